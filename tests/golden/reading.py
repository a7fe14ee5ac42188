"""Read recordings and the streams they were recorded from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final, NamedTuple

from cdc.decode.messages import Message, StreamStart, StreamStop
from cdc.decode.pgoutput import decode

RECORDINGS: Final = Path(__file__).parent / "recordings"


class Recording(NamedTuple):
    """What one server sent in one scenario: the payloads of each step, by its name."""

    major: int
    scenario: str
    payloads: dict[str, list[bytes]]


def load(path: Path) -> Recording:
    major, _, scenario = path.stem.partition("-")
    _header, *steps = map(json.loads, path.read_text().splitlines())
    payloads = {step["step"]: [bytes.fromhex(one) for one in step["payloads"]] for step in steps}
    return Recording(int(major), scenario, payloads)


def decode_all(payloads: list[bytes], *, parallel: bool) -> list[Message]:
    """Return the messages of `payloads`, which start outside a stream block."""
    messages: list[Message] = []
    in_stream = False
    for payload in payloads:
        message = decode(payload, in_stream=in_stream, parallel=parallel)
        in_stream = isinstance(message, StreamStart) or (
            in_stream and not isinstance(message, StreamStop)
        )
        messages.append(message)
    return messages
