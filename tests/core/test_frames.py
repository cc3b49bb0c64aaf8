"""Exceptions without the frames below their call, and the note that says where they were raised instead."""

import asyncio
import inspect
import sys
import traceback
from pathlib import Path

import pytest

import resilient
from resilient.core.base.errors import JobNotFound
from resilient.core.base.frames import Hidden, frameless, frameless_calls, from_callee, without_frames

HERE = Path(__file__).name
PACKAGE = Path(resilient.__file__).parent
OURS, THEIRS, BESIDE = f"{PACKAGE}/engine/x.py", "/srv/shop/handlers.py", f"{PACKAGE}_shop/x.py"


def test_hidden_texts_show_how_many_they_are():
    assert repr(Hidden(["canary", "canary-2"])) == "<2 hidden>"
    assert Hidden(["canary"]) == ("canary",)


def raised(error, cause=None, context=None):
    """The same error with a traceback, after these."""
    try:
        raise error  # noqa: TRY301 - for its frame
    except BaseException as caught:  # noqa: BLE001 - whatever it is
        caught.__cause__, caught.__context__ = cause, context
        return caught


def test_no_error_of_a_chain_keeps_its_frames_but_the_one_that_was_being_handled():
    deep, outer = raised(ValueError("deep")), raised(KeyError("outer"), raised(ValueError("before outer")))
    cause, context = raised(ValueError("cause"), deep, outer), raised(ValueError("context"), None, outer)
    error = raised(RuntimeError("last"), cause, context)
    deep.__context__ = error  # a circle
    assert without_frames(error, outer) is error
    assert [one.__traceback__ for one in (error, cause, context, deep)] == [None] * 4
    assert outer.__traceback__ is not None
    assert outer.__cause__.__traceback__ is not None
    without_frames(outer)
    assert outer.__traceback__ is outer.__cause__.__traceback__ is None


# -- whose frames ------------------------------------------------------------------------------------------------------


def traced(*files):
    """A traceback whose frames below this one are of these files."""
    call = "raise ValueError"
    for file in reversed(files):
        call = f"exec(compile({call!r}, {file!r}, 'exec'))"
    try:
        exec(compile(call, "begin", "exec"))  # noqa: S102 - frames of chosen files
    except ValueError as error:
        return error.__traceback__.tb_next.tb_next


def files_of(trace):
    return [one.filename for one in traceback.extract_tb(trace)]


@pytest.mark.parametrize(
    ("files", "rest"),
    [
        ([THEIRS], [THEIRS]),
        ([OURS, THEIRS], [THEIRS]),
        ([OURS, OURS, THEIRS, OURS], [THEIRS, OURS]),
        ([OURS, OURS], [OURS, OURS]),
        ([BESIDE, OURS], [BESIDE, OURS]),
    ],
)
def test_a_traceback_from_the_first_frame_that_is_not_the_engines(files, rest):
    assert files_of(from_callee(traced(*files))) == rest


def test_there_may_be_no_traceback():
    assert from_callee(None) is None


# -- functions ---------------------------------------------------------------------------------------------------------


def deeper(error, times=0):
    if times:
        deeper(error, times - 1)
    raise error


@frameless
def call(error=None, times=0):
    if error is not None:
        deeper(error, times)
    return "done"


@frameless
async def wait(error=None, times=0):
    await asyncio.sleep(0)
    if error is not None:
        deeper(error, times)
    return "done"


async def result(fn, *args, **words):
    made = fn(*args, **words)
    return await made if inspect.isawaitable(made) else made


async def failure(fn, *args, **words):
    """What it raises; the names of the functions in whose frames it stood, below this one."""
    try:
        await result(fn, *args, **words)
    except BaseException as error:  # noqa: BLE001 - whatever it is
        names = [one.name for one in traceback.extract_tb(error.__traceback__)]
        return error, names[names.index("result") + 1 :]
    pytest.fail("did not raise")


@pytest.mark.parametrize("fn", [call, wait])
async def test_a_frameless_function_is_the_function(fn):
    assert await result(fn) == "done"
    assert fn.__name__ == fn.__wrapped__.__name__
    assert inspect.signature(fn) == inspect.signature(fn.__wrapped__)
    assert inspect.iscoroutinefunction(fn) == inspect.iscoroutinefunction(fn.__wrapped__)


@pytest.mark.parametrize("fn", [call, wait])
async def test_what_it_raises_begins_at_its_caller_with_a_note_of_the_place(fn):
    wanted = ValueError("x")
    error, below = await failure(fn, wanted)
    assert error is wanted
    assert below == [fn.__name__]  # the frame of what wraps it, where nothing stands
    lines, first = inspect.getsourcelines(deeper)
    inner, inner_first = inspect.getsourcelines(fn.__wrapped__)
    at = first + next(n for n, line in enumerate(lines) if "raise error" in line)
    above = inner_first + next(n for n, line in enumerate(inner) if "deeper(" in line)
    places = f"{HERE}:{at} (deeper), {HERE}:{above} ({fn.__name__})"
    assert error.__notes__ == [f"raised at {places}; the frames are left out, because secrets stand in them"]


@pytest.mark.parametrize("fn", [call, wait])
async def test_no_frame_holds_its_arguments(fn):
    secret = ValueError("canary")
    error, _ = await failure(fn, error=secret, times=1)
    trace = error.__traceback__
    while trace.tb_next is not None:
        trace = trace.tb_next
    assert not {"args", "kwargs"} & set(trace.tb_frame.f_locals)


@pytest.mark.parametrize("fn", [call, wait])
async def test_a_note_has_the_last_five_places(fn):
    error, _ = await failure(fn, ValueError("x"), times=3)
    assert error.__notes__[0].count(f"{HERE}:") == 5
    assert error.__notes__[0].count("(deeper)") == 4
    error, _ = await failure(fn, ValueError("x"), times=7)
    assert error.__notes__[0].count("(deeper)") == 5
    assert fn.__name__ + ")" not in error.__notes__[0]


@pytest.mark.parametrize("fn", [call, wait])
@pytest.mark.parametrize("error", [JobNotFound("none"), KeyboardInterrupt(), asyncio.CancelledError()])
async def test_what_is_ours_or_no_error_has_no_frames_and_no_note(fn, error):
    caught, below = await failure(fn, error)
    assert caught is error
    assert below in ([], [fn.__name__])
    assert not hasattr(caught, "__notes__")


async def test_what_fails_without_a_frame_of_its_own_has_no_note():
    error, below = await failure(frameless(int), "canary")
    assert type(error) is ValueError
    assert below == ["call"]
    assert not hasattr(error, "__notes__")


@pytest.mark.parametrize("fn", [call, wait])
async def test_what_is_being_handled_outside_keeps_its_frames(fn):
    try:
        raise KeyError("outer")  # noqa: TRY301 - handled by what calls the other
    except KeyError:
        outer = sys.exception()
        error, _ = await failure(fn, raised(ValueError("x")))
    assert error.__context__ is outer
    assert outer.__traceback__ is not None


# -- classes -----------------------------------------------------------------------------------------------------------


async def test_the_public_methods_of_a_class_are_frameless():
    class Vault:
        kind = int  # no function of its own

        def __init__(self, error=None):
            if error is not None:
                deeper(error)

        def open(self, error):
            deeper(error)

        async def wait(self, error):
            deeper(error)

        def _open(self, error):
            deeper(error)

        async def each(self):
            yield 1

    untouched = Vault.__init__, Vault._open, Vault.each
    assert frameless_calls(Vault) is Vault
    assert (Vault.__init__, Vault._open, Vault.each) == untouched
    assert Vault.kind is int
    for fn, name in ((Vault().open, "call"), (Vault().wait, "wait")):
        error, below = await failure(fn, ValueError("x"))
        assert "deeper" not in below, name
        assert "(deeper)" in error.__notes__[0]
    for fn in (Vault()._open, Vault):
        error, below = await failure(fn, ValueError("x"))
        assert below[-1] == "deeper"
        assert not hasattr(error, "__notes__")
