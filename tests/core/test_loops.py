"""What there is once for each event loop: as long as that is open."""

import asyncio
import gc
import weakref

from resilient.core.base.loops import PerLoop


async def test_a_loop_has_one_value_and_another_loop_another():
    values, loop, other = PerLoop(object), asyncio.get_running_loop(), asyncio.new_event_loop()
    assert values.of(loop) is values.of(loop)
    assert values.of(loop) is not values.of(other)
    other.close()


def test_a_loop_is_not_kept_after_its_end():
    """Although its value refers to it: a semaphore that somebody has waited for does."""
    values, loops = PerLoop(lambda: asyncio.Semaphore(1)), []

    async def contend():
        loops.append(weakref.ref(loop := asyncio.get_running_loop()))

        async def enter():
            async with values.of(loop):
                await asyncio.sleep(0)

        await asyncio.gather(enter(), enter())

    for _ in range(3):
        asyncio.run(contend())
    gc.collect()
    assert [loop() for loop in loops[:2]] == [None, None]
