"""Text that every database takes: PostgreSQL stores no NUL, and neither database a lone surrogate.

Messages of exceptions and codes of providers may hold both. One that cannot be stored would hold up the results of
every job that is written with it.
"""


def plain(text: str) -> str:
    """``text`` with NULs and lone surrogates written out."""
    try:
        text.encode()
    except UnicodeEncodeError:
        text = text.encode("utf-8", "backslashreplace").decode()
    return text.replace("\0", "\\x00")
