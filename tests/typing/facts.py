"""What a type checker refuses in facts: a word that nobody knows. `mypy` reads this file; nothing runs it."""

from resilient import Incremental, NextCursor, OAuth2, Rotation, Signature, Wait, Webhook

OAuth2(token_url="https://x.example", body="json", client_auth="basic", pkce="required", rotation=Rotation.GRACE)
OAuth2(token_url="https://x.example", body="jsno")  # type: ignore[arg-type]
OAuth2(token_url="https://x.example", client_auth="bogus")  # type: ignore[arg-type]
OAuth2(token_url="https://x.example", rotation="single_use")  # type: ignore[arg-type]
OAuth2(token_url="https://x.example", flows=("code",))  # type: ignore[arg-type]
OAuth2(token_url="https://x.example", zero_lifetime="never")  # type: ignore[arg-type]
Incremental(style="token", query="q", cursor="f", source="last_page", deletions="never")
Incremental(style="token", query="q", cursor="f", source="last")  # type: ignore[arg-type]
Incremental(style="token", query="q", cursor="f", deletions="gone")  # type: ignore[arg-type]
Incremental(style="cursor", query="q", cursor="f")  # type: ignore[arg-type]
NextCursor(cursor="f", query="q", absent="empty")
NextCursor(cursor="f", query="q", absent="none")  # type: ignore[arg-type]
Signature(header="h", scheme="hmac-md5")  # type: ignore[arg-type]
Signature(header="h", key="pem")  # type: ignore[arg-type]
Webhook(token="t", challenge="ping")  # type: ignore[arg-type]
Wait(period="week")  # type: ignore[arg-type]
