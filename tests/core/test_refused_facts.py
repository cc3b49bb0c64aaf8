"""Facts of a provider that make no sense are refused where they are written, with the option and what to write."""

from __future__ import annotations

import pytest

from resilient.core.base.errors import FailureKind, InvalidInput, Scope
from resilient.core.gates.rate_limit import Limit
from resilient.core.provider.auth import ApiKey, Basic, OAuth2, Rotation
from resilient.core.provider.facts import BatchEndpoint, Idempotency, Provider
from resilient.core.provider.rules import Errors, Rule, Wait

NO_PATH = "'a]' is no path into a body: write error.code, errors[0].code, errors[].code"
NO_PATTERN = "is no regular expression: missing ), unterminated subpattern at position 0"
ANSWERS = ", ".join(f"FailureKind.{kind.name}" for kind in tuple(FailureKind)[:8])
KINDS = ", ".join(f"FailureKind.{kind.name}" for kind in FailureKind)
WORDS = (
    "Word.DELTA_S, Word.DELTA_S_FLOAT, Word.DELTA_MS, Word.EPOCH_S, Word.EPOCH_S_FLOAT, Word.EPOCH_MS, Word.ISO8601,"
    " Word.HTTP_DATE, Word.DURATION, Word.AUTO, Word.NONE"
)
STATUS = "a status is a number from 100 to 599, several or a range"
ONLY = "say by what such a success is told from others"
THROTTLED = FailureKind.THROTTLED


def refusal(cls, facts):
    with pytest.raises(InvalidInput) as caught:
        cls(**facts)
    return str(caught.value)


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"client_auth": "x"}, "OAuth2(client_auth='x'): client_auth is one of 'post', 'basic', 'jwt', 'none'"),
        ({"pkce": "x"}, "OAuth2(pkce='x'): pkce is one of 'required', 'supported', 'none'"),
        ({"scopes": "a"}, "OAuth2(scopes='a'): scopes lists texts: write ('a',)"),
        ({"offline_scopes": "a"}, "OAuth2(offline_scopes='a'): offline_scopes lists texts: write ('a',)"),
        ({"flows": "a"}, "OAuth2(flows='a'): flows lists texts: write ('a',)"),
        ({"keep": "a"}, "OAuth2(keep='a'): keep lists texts: write ('a',)"),
        ({"keep_callback": "a"}, "OAuth2(keep_callback='a'): keep_callback lists texts: write ('a',)"),
        ({"success": "a"}, "OAuth2(success='a'): success lists texts: write ('a',)"),
        (
            {"flows": ("x",)},
            "OAuth2(flows='x'): flows is one of 'authorization_code', 'client_credentials', 'jwt_bearer'",
        ),
        ({"lifetime": 0}, "OAuth2(lifetime=0): lifetime is a number above 0"),
        ({"lifetime_unit": 0}, "OAuth2(lifetime_unit=0): lifetime_unit is a number above 0"),
        ({"refresh_lifetime": 0}, "OAuth2(refresh_lifetime=0): refresh_lifetime is a number above 0"),
        ({"margin": -1}, "OAuth2(margin=-1): margin is a number from 0"),
        ({"keep": ("a]",)}, f"OAuth2(keep=...): {NO_PATH}"),
        ({"success": ("a]",)}, f"OAuth2(success=...): {NO_PATH}"),
        ({"lifetime_field": "a]"}, f"OAuth2(lifetime_field=...): {NO_PATH}"),
        ({"early_field": "a]"}, f"OAuth2(early_field=...): {NO_PATH}"),
        ({"refresh_lifetime_field": "a]"}, f"OAuth2(refresh_lifetime_field=...): {NO_PATH}"),
        ({"token_url": ""}, "OAuth2(token_url=''): say where tokens are asked for"),
        ({"success": ()}, "OAuth2(success=()): say at which path of an answer the token is"),
        ({"key_header": {"kid": "1"}}, "OAuth2(client_auth='post'): key_header= is for client_auth='jwt'"),
        (
            {"refreshes": False, "refresh_url": "https://a.example", "refresh_lifetime": 5},
            "OAuth2(refreshes=False): there are no refreshes for refresh_url, refresh_lifetime",
        ),
        ({"grace": 5}, "OAuth2(grace=5) needs rotation=Rotation.GRACE and more than 0 s"),
        (
            {"rotation": Rotation.GRACE, "grace": 0},
            "OAuth2(grace=0) needs rotation=Rotation.GRACE and more than 0 s",
        ),
        (
            {"refreshes": False, "rotation": Rotation.OLD_KEPT},
            "OAuth2(refreshes=False): there is no refresh token that could rotate",
        ),
        (
            {"revoke_url": "http://a.example/?key=canary"},
            "'http://a.example/?key=…': secrets are sent there, so it must be https://",
        ),
    ],
)
def test_of_oauth(facts, message):
    assert refusal(OAuth2, {"token_url": "https://auth.example.com/token", **facts}) == message


@pytest.mark.parametrize(
    "facts",
    [
        {"refresh_url": "{home}/token"},
        {"client_auth": "jwt", "key_header": {"kid": "1"}},
        {"rotation": Rotation.GRACE, "grace": 0.5},
        {"rotation": Rotation.GRACE},
        {"refreshes": False},
        {"refresh_lifetime": 5},
        {"margin": 0},
        {"flows": ()},
    ],
)
def test_of_oauth_what_makes_sense_is_taken_as_it_is(facts):
    made = OAuth2(token_url="https://auth.example.com/token", **facts)
    assert {name: getattr(made, name) for name in facts} == facts


@pytest.mark.parametrize(
    ("cls", "facts", "message"),
    [
        (Wait, {"word": "x"}, f"Wait(word='x'): word is one of {WORDS}"),
        (Wait, {"period": "x"}, "Wait(period='x'): period is one of '', 'hour', 'day', 'month'"),
        (Wait, {"fallback": 0}, "Wait(fallback=0): fallback is a number above 0"),
        (Wait, {"text": "("}, f"Wait(text='(') {NO_PATTERN}"),
        (Wait, {"body": "a]"}, f"Wait(body=...): {NO_PATH}"),
        (
            Wait,
            {"fallback": 5, "period": "day"},
            "Wait(fallback=5, period='day'): told nothing, it is one or the other",
        ),
        (
            Rule,
            {"kind": FailureKind.BUG},
            f"Rule(<FailureKind.BUG: 'bug'>): an answer means one of {ANSWERS}, or None for a success",
        ),
        (Rule, {"kind": "auth"}, f"Rule(kind='auth'): kind is one of {KINDS}"),
        (
            Rule,
            {"kind": THROTTLED, "scope": "account"},
            "Rule(scope='account'): scope is one of Scope.ENDPOINT, Scope.ACCOUNT, Scope.PROVIDER",
        ),
        (Rule, {"kind": None, "scope": Scope.ACCOUNT}, "Rule(None): a success has no scope= and no wait="),
        (Rule, {"kind": None, "wait": Wait()}, "Rule(None): a success has no scope= and no wait="),
        (Rule, {"kind": THROTTLED, "code": (5,)}, "Rule(code=(5,)): code lists texts: write ((5,),)"),
        (Rule, {"kind": THROTTLED, "where": {"a]": 1}}, f"Rule(where=...): {NO_PATH}"),
        (Rule, {"kind": THROTTLED, "header": {"x": "("}}, f"Rule(header='(') {NO_PATTERN}"),
        (Rule, {"kind": THROTTLED, "text": "("}, f"Rule(text='(') {NO_PATTERN}"),
        (Rule, {"kind": THROTTLED, "status": 99}, f"Rule(status=99): {STATUS}"),
        (Rule, {"kind": THROTTLED, "status": 600}, f"Rule(status=600): {STATUS}"),
        (Rule, {"kind": THROTTLED, "status": True}, f"Rule(status=True): {STATUS}"),
        (Rule, {"kind": THROTTLED, "status": ("403",)}, f"Rule(status=('403',)): {STATUS}"),
        (Rule, {"kind": THROTTLED, "status": (400, 600)}, f"Rule(status=(400, 600)): {STATUS}"),
        (
            Rule,
            {"kind": THROTTLED, "status": 200},
            f"Rule(<FailureKind.THROTTLED: 'throttled'>, status=200): {ONLY}",
        ),
        (
            Rule,
            {"kind": THROTTLED, "status": range(299, 600)},
            f"Rule(<FailureKind.THROTTLED: 'throttled'>, status=range(299, 600)): {ONLY}",
        ),
        (Errors, {"code": "a"}, "Errors(code='a'): code lists texts: write ('a',)"),
        (Errors, {"message": "a"}, "Errors(message='a'): message lists texts: write ('a',)"),
        (Errors, {"code": ("a]",)}, f"Errors(code=...): {NO_PATH}"),
        (Errors, {"message": ("a]",)}, f"Errors(message=...): {NO_PATH}"),
        (Errors, {"code_text": "a"}, "Errors(code_text='a') has 0 groups, not 1: the group is what is read"),
        (
            Errors,
            {"code_form": "(a)(b)"},
            "Errors(code_form='(a)(b)') has 2 groups, not 1: the group is what is read",
        ),
        (Errors, {"rules": (Rule(THROTTLED), 5, 6)}, "Errors(rules=...): rules lists Rule(...), not 5"),
    ],
)
def test_of_a_dialect(cls, facts, message):
    assert refusal(cls, facts) == message


@pytest.mark.parametrize(
    "facts",
    [
        *(
            {"status": 200, **one}
            for one in (
                {"code": "a"}, {"code": ("a",)}, {"where": {"a": 1}}, {"header": {"x": "a"}}, {"text": "a"},
                {"path": "/a"}, {"json": False}, {"json": True},
            )
        ),
        {"kind": None, "status": 200},
        {"kind": None, "path": "/a"},
        *({"status": one} for one in (100, 199, 300, 599, range(300, 600), (100, 599))),
        {"scope": Scope.PROVIDER, "wait": Wait()},
        *({"kind": kind} for kind in tuple(FailureKind)[:8]),
    ],
)  # fmt: skip
def test_of_a_rule_what_makes_sense_is_taken_as_it_is(facts):
    made = Rule(**{"kind": THROTTLED, **facts})
    assert {name: getattr(made, name) for name in facts} == facts


METHODS = "DELETE, GET, HEAD, OPTIONS, PATCH, POST, PUT, QUERY, TRACE"
KEY_PLACE = "Idempotency(): say in which header= or query= the key goes, of which methods= and paths="
IN_PATH = "Idempotency(in_path=True): the handler writes the key into the path: leave out query=, made_up= and quoted="


@pytest.mark.parametrize(
    ("cls", "facts", "message"),
    [
        (Idempotency, {"methods": "POST"}, "Idempotency(methods='POST'): methods lists texts: write ('POST',)"),
        (Idempotency, {"paths": "*"}, "Idempotency(paths='*'): paths lists texts: write ('*',)"),
        (
            Idempotency,
            {"lives_with": "x"},
            "Idempotency(lives_with='x'): lives_with is one of 'account', 'grant'",
        ),
        (Idempotency, {"life": 0}, "Idempotency(life=0): life is a number above 0"),
        (Idempotency, {"made_up": "("}, f"Idempotency(made_up='(') {NO_PATTERN}"),
        (Idempotency, {"header": ""}, KEY_PLACE),
        (Idempotency, {"methods": frozenset()}, KEY_PLACE),
        (Idempotency, {"paths": ()}, KEY_PLACE),
        (Idempotency, {"in_path": True, "query": "k"}, IN_PATH),
        (Idempotency, {"in_path": True, "made_up": "k"}, IN_PATH),
        (Idempotency, {"in_path": True, "quoted": True}, IN_PATH),
        (
            Idempotency,
            {"methods": frozenset({"POST", "YELL", "CALL"})},
            f"Idempotency(methods=...): 'CALL' is none of {METHODS}",
        ),
        (
            BatchEndpoint,
            {"path": "$batch"},
            "BatchEndpoint(path='$batch'): a path below the base URL, such as '/$batch'",
        ),
        *(
            (
                BatchEndpoint,
                {"path": "/b", "most": most},
                f"BatchEndpoint(most={most!r}): how many parts one batch takes, from 1",
            )
            for most in (0, True, 1.5)
        ),
    ],
)
def test_of_keys_and_batches(cls, facts, message):
    assert refusal(cls, facts) == message


def test_of_keys_and_batches_what_makes_sense_is_taken():
    assert BatchEndpoint(path="/b", most=1).most == 1
    assert Idempotency(header="", query="k", made_up="k", quoted=True).query == "k"
    assert Idempotency(in_path=True).in_path
    assert Idempotency(life=1).life == 1


NO_NAME = (
    "cannot name a provider: as the first segment of resource keys it has letters, digits and ._:@+- only, and is"
    " neither '.' nor '..', such as 'github'"
)
NO_PLACEHOLDER = "a placeholder is a name of letters, digits and _ in braces, such as {account_id}"


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        *(({"name": name}, f"{name!r} {NO_NAME}") for name in ("", "a/b", ".", "..")),
        ({"base_url": "https://{a b}"}, f"'https://{{a b}}': {NO_PLACEHOLDER}"),
        ({"headers": {"X": "}"}}, f"'}}': {NO_PLACEHOLDER}"),
        ({"hosts": "a"}, "Provider(hosts='a'): hosts lists texts: write ('a',)"),
        ({"reads": "a"}, "Provider(reads='a'): reads lists texts: write ('a',)"),
        ({"sources": "a"}, "Provider(sources='a'): sources lists texts: write ('a',)"),
        ({"unverified": "a"}, "Provider(unverified='a'): unverified lists texts: write ('a',)"),
        ({"waits": 5}, "provider 'p': waits= takes WaitDialect, not 5"),
        ({"errors": 5}, "provider 'p': errors= takes Errors, not 5"),
        ({"auth": (Basic(), 5)}, "provider 'p': auth= takes OAuth2 or Bearer or ApiKey or Basic, not 5"),
        ({"auth": [Basic()]}, "provider 'p': auth= takes a tuple, not a list"),
        ({"pagination": {"a": 5}}, "provider 'p': pagination= takes Paginator, not 5"),
        ({"incremental": {"a": 5}}, "provider 'p': incremental= takes Incremental, not 5"),
        ({"webhook": 5}, "provider 'p': webhook= takes Webhook, not 5"),
        ({"batch": 5}, "provider 'p': batch= takes BatchEndpoint, not 5"),
        *(
            ({"reads": ("POST /a", one)}, f"provider 'p': reads={one!r}: write a method and a path, 'POST /v1/search'")
            for one in ("/search", "YELL /search", "POST", "POST ")
        ),
        ({"route": 5}, "provider 'p': route= takes a function, not 5"),
        ({"cost": 5}, "provider 'p': cost= takes a function, not 5"),
        (
            {"exceptions": {"a.A": FailureKind.AUTH, "a.B": repr, "a.C": 5}},
            "provider 'p': exceptions={'a.C': 5}: say FailureKind.TRANSIENT or a function",
        ),
        (
            {"limits": {"account": Limit(1, per=1)}},
            "provider 'p': limits={'account': ...} takes a list of Limit(...)",
        ),
        ({"limits": {"account": [5]}}, "provider 'p': limits={'account': ...} takes a list of Limit(...)"),
        *(
            (
                {"concurrency": {"provider": 1, "account": cap}},
                f"provider 'p': concurrency={{'account': {cap!r}}}: a number of jobs, from 1",
            )
            for cap in (0, True, 1.5)
        ),
        *(
            (
                {"limits": {level: []}},
                f"{level!r} is no level of provider 'p': use 'provider', 'account' or 'account/<suffix>'",
            )
            for level in ("acount", "provider/x", "account/", "*", "")
        ),
        (
            {"concurrency": {"x": 1}},
            "'x' is no level of provider 'p': use 'provider', 'account' or 'account/<suffix>'",
        ),
    ],
)  # fmt: skip
def test_of_a_provider(facts, message):
    assert refusal(Provider, {"name": "p", **facts}) == message


ELSEWHERE = "is at another host than 'https://api.example/v1': credentials would go there"
HARMFUL = "could change something: use GET or HEAD, or name it in reads="
WHOAMI = "write a method and a path below the base URL ('GET /user'), or a GraphQL query ('{ viewer { id } }')"


@pytest.mark.parametrize(
    ("whoami", "message"),
    [
        (7, "whoami= takes text, such as 'GET /user', not 7"),
        ("/me", f"whoami='/me': {WHOAMI}"),
        ("GET me", f"whoami='GET me': {WHOAMI}"),
        ("YELL /me", f"whoami='YELL /me': {WHOAMI}"),
        ("YELL https://api.example/me", f"whoami='YELL https://api.example/me': {WHOAMI}"),
        ("GET https://elsewhere.example/me", f"whoami='GET https://elsewhere.example/me' {ELSEWHERE}"),
        ("GET http://api.example/me", f"whoami='GET http://api.example/me' {ELSEWHERE}"),
        ("POST /me?a=/b", f"whoami='POST /me?a=/b' {HARMFUL} ('POST /v1/me')"),
        ("DELETE https://api.example/me", f"whoami='DELETE https://api.example/me' {HARMFUL} ('DELETE /me')"),
    ],
)
def test_of_a_request_that_could_do_harm(whoami, message):
    told = refusal(Provider, {"name": "p", "base_url": "https://api.example/v1", "whoami": whoami})
    assert told == f"provider 'p': {message}"


@pytest.mark.parametrize(
    ("base_url", "whoami", "reads"),
    [
        ("https://api.example/v1", "GET /me", ""),
        ("https://api.example/v1", "HEAD https://api.example/me", ""),
        ("https://api.example/v1", "POST /me", "POST /v1/me"),
        ("https://api.example/v1", "POST /me?a=b", "POST /v1/me"),
        ("https://api.example/X/", "POST /me", "POST /X/me"),
        ("https://api.example/v1", "POST https://api.example/me", "POST /me"),
        ("https://{shop}.example/v1", "POST https://{shop}.example/me", "POST /me"),
        ("{home}/v1", "POST /me", "POST /v1/me"),
        ("", "POST /me", "POST /me"),
        ("", "{ viewer(url: 'https://api.example') { id } }", ""),
    ],
)
def test_of_a_test_request_what_does_no_harm_is_taken(base_url, whoami, reads):
    made = Provider(name="p", base_url=base_url, whoami=whoami, reads=(reads,) if reads else ())
    assert made.whoami == whoami


AUTH = (ApiKey(), OAuth2(token_url="https://auth.example.com/token"))
NO_OAUTH = "has no OAuth: {} would go nowhere; its credentials belong to a connection"
OWN_WORDS = (
    "anonymous, auth, authorize_params, base_url, client_auth, concurrency, errors, exceptions, headers, hosts,"
    " idempotency, key_header, limits, name, private_hosts, propagates_trace, redirect_uri, route, scopes, sign_in_at,"
    " single_account, waits, whoami"
)


@pytest.mark.parametrize(
    ("auth", "own", "message"),
    [
        (
            (Basic(),),
            {"client_secret": "canary", "client_id": "a", "scopes": ()},
            f"provider 'p' {NO_OAUTH.format('client_id, client_secret')}",
        ),
        ((), {"redirect_uri": "https://a.example"}, f"provider 'p' {NO_OAUTH.format('redirect_uri')}"),
        (AUTH, {"zimits": {}, "limts": {}}, f"provider 'p': limts= is none of {OWN_WORDS}"),
    ],
)
def test_of_an_apps_own_words(auth, own, message):
    with pytest.raises(InvalidInput) as caught:
        Provider(name="p", auth=auth).configured(**own)
    assert str(caught.value) == message
