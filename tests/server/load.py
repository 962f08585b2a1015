"""Many clients at once: python load.py HOST PORT MODEL SECONDS STREAMS VANISH, and cases as JSON on stdin.

A case is the body of a completion. Each client asks for one after another, at random, until the time is over; a share
VANISH of the answers is left at a random moment. Prints one JSON object: answers by case, how many vanished, errors.
A process of its own, so that what the server's process holds is the server's.
"""

import asyncio
import json
import random
import sys
from collections import Counter
from typing import Any

from wavegraph.bench.sse import DONE, AnswerError, stream


class Load:
    def __init__(self, host: str, port: int, cases: list[dict[str, Any]], vanish: float) -> None:
        self.address = (host, port)
        self.cases = cases
        self.vanish = vanish
        self.answers: list[Counter[str]] = [Counter() for _ in cases]
        self.vanished = 0
        self.errors: list[str] = []

    async def client(self, seed: int, seconds: float) -> None:
        draw, loop = random.Random(seed), asyncio.get_running_loop()
        end = loop.time() + seconds
        while loop.time() < end:
            case = draw.randrange(len(self.cases))
            leave = draw.randrange(self.cases[case]["max_tokens"]) if draw.random() < self.vanish else None
            try:
                await self.ask(case, leave)
            except (OSError, EOFError, AnswerError, ValueError) as error:
                self.errors.append(f"case {case}: {error!r}")

    async def ask(self, case: int, leave: int | None) -> None:
        text, reason, count = "", None, 0
        events = stream(*self.address, "/v1/completions", self.cases[case])
        try:
            async for event in events:
                if event == DONE:
                    break
                data = json.loads(event)
                if "error" in data:
                    self.errors.append(f"case {case}: {data['error']}")
                    return
                for choice in data["choices"]:
                    text += choice["text"]
                    reason = choice["finish_reason"] or reason
                count += 1
                if leave is not None and count > leave:
                    break
        finally:
            await events.aclose()
        if leave is not None:
            self.vanished += 1
        else:
            self.answers[case][json.dumps([text, reason])] += 1


async def main(host: str, port: str, model: str, seconds: str, streams: str, vanish: str) -> None:
    cases = [{"model": model, "stream": True} | case for case in json.load(sys.stdin)]
    load = Load(host, int(port), cases, float(vanish))
    await asyncio.gather(*(load.client(seed, float(seconds)) for seed in range(int(streams))))
    print(json.dumps({"answers": load.answers, "vanished": load.vanished, "errors": load.errors}))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
