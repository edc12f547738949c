"""Drives an engine: inbox -> loop -> outboxes, until told to stop. Knows neither sockets nor threads."""

from __future__ import annotations

from collections.abc import Callable

from octavo.engine.loop import EngineLoop
from octavo.engine.messages import Deltas, Inbound, Outbound, Shutdown


def pump(
    engine: EngineLoop,
    *,
    receive: Callable[[bool], list[Inbound]],
    publish: Callable[[int, Outbound], None],
    num_clients: int = 1,
) -> None:
    """Serve until a Shutdown message.

    receive(block): all messages that wait; with `block`, at least one, however long it takes. publish(client, message)
    sends one. When the last work ends, every client gets the final gauges, so that none keeps showing a busy engine.
    An exception of the engine leaves this function: the caller says to the clients that it is dead.
    """
    clients = set(range(num_clients))
    while True:
        for message in receive(not engine.has_work):
            if isinstance(message, Shutdown):
                return
            clients.add(message.client)
            engine.receive(message)
        if not engine.has_work:
            continue
        for client, deltas in engine.step().items():
            publish(client, deltas)
        done = engine.take_done()
        if done or not engine.has_work:
            final = Deltas(step=engine.stats.steps, stats=engine.stats)
            for client in clients:
                publish(client, final)
        for client, answer in done:  # behind the gauges, which then tell what was done
            publish(client, answer)


def describe(error: BaseException) -> str:
    """One line for a person: the class of the error and what it says."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
