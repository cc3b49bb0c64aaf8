// What makes pages livelier; without it everything works, too.
(() => {
  "use strict";
  const PACE = 1000, EVERY = 2000, SLOW = 5000, FAILED = 5000, SPOKEN = 15000; // milliseconds
  const keep = (name, value) => { try { localStorage.setItem("resilient-" + name, value); } catch {} };
  const kept = (name) => { try { return localStorage.getItem("resilient-" + name); } catch { return null; } };
  const $ = (id) => document.getElementById(id);

  // Times in the reader's zone; the title keeps UTC.
  const clock = new Intl.DateTimeFormat(undefined, { month: "2-digit", day: "2-digit", hour: "2-digit", minute: "2-digit", second: "2-digit", timeZoneName: "short" });
  const localise = (root) => {
    for (const one of root.querySelectorAll("time:not([data-far])")) one.textContent = clock.format(new Date(one.dateTime));
  };

  // Live: the part of the page that changes is fetched again, at most once a second, never while hidden. The server's
  // signals say when; a slow look goes on beside them, because ages grow and no signal may come. Without signals
  // (SQLite, too many pages, a proxy that cuts streams) the look is all there is.
  let etag = "", timer = 0, last = 0, source = null, again = 0, focus = null, open = [], told = 0, opened = 0;
  const live = () => $("live");
  const on = () => $("live-switch") && $("live-switch").checked;
  const every = () => Number(live() && live().dataset.every) || (source && source.readyState === EventSource.OPEN ? SLOW : EVERY);
  const busy = () => {
    const part = live(), at = document.activeElement;
    if (!part) return true;
    if (part.contains(at) && /^(INPUT|SELECT|TEXTAREA)$/.test(at.tagName)) return true;
    const chosen = getSelection();
    return chosen && !chosen.isCollapsed && part.contains(chosen.anchorNode);
  };
  const later = (ms) => { clearTimeout(timer); timer = setTimeout(look, Math.max(ms, last + PACE - Date.now())); };
  const look = () => {
    if (!live() || document.hidden || !on() || busy() || !window.htmx) return later(EVERY);
    last = Date.now();
    htmx.ajax("GET", live().dataset.live, { source: live(), target: "#live", select: "#live", swap: "outerHTML" });
  };
  const listen = () => {
    clearTimeout(again);
    const address = $("main").dataset.signals, wanted = address && live() && on() && !document.hidden;
    if (source && (!wanted || source.readyState === EventSource.CLOSED)) { source.close(); source = null; }
    if (!wanted || source || !window.EventSource) return;
    source = new EventSource(address);
    source.onmessage = () => later(0);
    source.onopen = () => later(opened++ ? 0 : SLOW); // not the first time: the page is new
    source.onerror = () => { if (source && source.readyState === EventSource.CLOSED) again = setTimeout(listen, FAILED); };
  };
  // An old page must not look like a new one: it says since when nobody answered.
  const stale = (status) => {
    const note = $("stale"), well = status && status < 400;
    if (!note || well === note.hidden) return;
    note.hidden = well;
    note.textContent = well ? "" : (status ? "This page is no longer kept up to date (the server says " + status + ")"
      : "The server does not answer") + ": what you see is as of " + clock.format(new Date(last)) + ".";
  };
  // What has the focus, so that it has it in the new part, too: by id, else by its address or name among its equals.
  const marked = (at) => {
    if (at.id) return ["#" + CSS.escape(at.id), 0];
    const href = at.getAttribute("href"), name = at.getAttribute("name"), tag = at.tagName.toLowerCase();
    const which = tag + (href ? '[href="' + CSS.escape(href) + '"]' : name ? '[name="' + CSS.escape(name) + '"]' : "");
    return [which, [...live().querySelectorAll(which)].indexOf(at)];
  };
  document.addEventListener("htmx:configRequest", (event) => {
    if (etag) event.detail.headers["If-None-Match"] = etag;
  });
  document.addEventListener("htmx:beforeSwap", () => {
    const part = live(), at = document.activeElement;
    focus = part && part !== at && part.contains(at) ? marked(at) : null;
    open = [...document.querySelectorAll("#live details, #more details")].map((one) => one.open);
  });
  document.addEventListener("htmx:afterRequest", (event) => {
    const answer = event.detail.xhr, status = answer ? answer.status : 0;
    etag = (answer && answer.getResponseHeader("ETag")) || etag;
    stale(status);
    later(status && status < 400 ? every() : FAILED);
  });
  document.addEventListener("htmx:afterSettle", () => {
    const part = live();
    if (!part) return;
    localise(document);
    [...document.querySelectorAll("#live details, #more details")].forEach((one, n) => {
      if (open[n] !== undefined) one.open = open[n];
    });
    if (focus) { const at = part.querySelectorAll(focus[0])[focus[1]]; if (at) at.focus({ preventScroll: true }); }
    const sentence = $("sentence"), announce = $("announce");
    if (sentence && announce && Date.now() - told > SPOKEN && announce.textContent !== sentence.textContent) {
      announce.textContent = sentence.textContent;
      told = Date.now();
    }
  });
  document.addEventListener("visibilitychange", () => { listen(); if (!document.hidden) later(100); });
  addEventListener("pagehide", () => { if (source) { source.close(); source = null; } });
  addEventListener("pageshow", (event) => { if (event.persisted) { listen(); later(100); } });

  // A second click on the button of a change, before the next page is there, is no second change.
  const ONCE = 10000; // milliseconds
  document.addEventListener("submit", (event) => {
    const form = event.target, now = Date.now();
    if (form.method !== "post") return;
    if (now - Number(form.dataset.sent || 0) < ONCE) event.preventDefault();
    else form.dataset.sent = now;
  });
  addEventListener("pageshow", () => { for (const form of document.forms) delete form.dataset.sent; });

  // Keys, which can be switched off.
  let chord = "";
  const rows = () => [...document.querySelectorAll("[data-row]")];
  const step = (by) => {
    const all = rows(), at = all.findIndex((one) => one.contains(document.activeElement));
    const next = all[Math.min(all.length - 1, Math.max(0, at + by))];
    const link = next && next.querySelector("a");
    if (link) { link.focus(); next.scrollIntoView({ block: "nearest" }); }
  };
  document.addEventListener("keydown", (event) => {
    const at = document.activeElement;
    if (event.ctrlKey || event.metaKey || event.altKey || !$("keys-switch").checked) return;
    if (at && /^(INPUT|SELECT|TEXTAREA)$/.test(at.tagName)) { if (event.key === "Escape") at.blur(); return; }
    const pages = { n: "/", a: "/accounts", j: "/jobs", d: "/dead", w: "/workers", s: "/system" };
    if (chord === "g" && pages[event.key]) {
      const link = [...document.querySelectorAll("nav a")].find((one) => one.pathname.endsWith(pages[event.key]));
      if (link) link.click();
    } else if (event.key === "/") {
      const field = $("search");
      if (field) { event.preventDefault(); field.focus(); field.select(); }
    } else if (event.key === "?") $("help").showModal();
    else if (event.key === "j" && chord !== "g") step(1);
    else if (event.key === "k") step(-1);
    chord = event.key;
  });

  for (const name of ["live", "keys"]) {
    const box = $(name + "-switch");
    if (!box) continue;
    box.checked = kept(name) !== "off";
    box.addEventListener("change", () => { keep(name, box.checked ? "on" : "off"); listen(); later(100); });
  }
  $("theme")?.addEventListener("click", () => {
    const root = document.documentElement, dark = matchMedia("(prefers-color-scheme: dark)").matches;
    const next = (root.dataset.theme || (dark ? "dark" : "light")) === "dark" ? "light" : "dark";
    root.dataset.theme = next; keep("theme", next);
  });
  document.addEventListener("click", (event) => {
    const button = event.target.closest(".copy");
    if (!button) return;
    navigator.clipboard?.writeText(button.dataset.copy).then(() => { button.textContent = "copied"; });
  });
  // An address that says what was done must not say it again on reload.
  const here = new URL(location.href);
  if (here.searchParams.has("note")) { here.searchParams.delete("note"); here.searchParams.delete("by"); history.replaceState(null, "", here); }
  localise(document);
  later(live() && live().dataset.every ? PACE : EVERY);
  listen();
})();
