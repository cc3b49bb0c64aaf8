// Before anything is painted: the theme somebody chose, and that scripts run.
(() => {
  const root = document.documentElement;
  root.classList.add("js");
  try {
    const theme = localStorage.getItem("resilient-theme");
    if (theme) root.dataset.theme = theme;
  } catch {}
})();
