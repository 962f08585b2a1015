"""Rows become tasks: what a step runs is written into its plan, as tasks and as the lists that the device gets."""

from wavegraph.scheduler.lanes import Taken
from wavegraph.scheduler.plan import CodaAction, ExecutionTask, ExitPolicy, Kind, Phase, StepPlan
from wavegraph.scheduler.request import Request

PROMPT, DECODE = Kind.PROMPT, Kind.DECODE
COMPOSITE_DEPTH0, RECURRENT, CODA = Phase.COMPOSITE_DEPTH0, Phase.RECURRENT, Phase.CODA
FULL_DEPTH, DECODE_DEPTH = ExitPolicy.FULL_DEPTH, ExitPolicy.DECODE_DEPTH


class TaskWriter:
    """Writes rows into plans and numbers the tasks. It moves no frontier; it counts what a request has in flight."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._tasks = 0

    def add_spans(self, plan: StepPlan, lanes: Taken) -> None:
        """Append rows ``next .. next + count`` of each lane, and the tokens of those at depth 0 that the host has.

        One loop over local names: this is what a step costs the host.
        """
        page_size, step_id, task_id = self._page_size, plan.step_id, self._tasks
        tasks, slots, starts, counts, depths = (
            plan.tasks,
            plan.span_slot,
            plan.span_start,
            plan.span_count,
            plan.span_depth,
        )
        for lane, count in lanes:
            request, depth, start = lane.request, lane.depth, lane.next
            slot, end = request.slot, start + count
            if depth == 0 and start < request.host_end:
                plan.token_slot.extend([slot] * count)
                plan.token_pos.extend(range(start, end))
                plan.token_id.extend(request.tokens[start:end])
            request.in_flight += 1
            task_id += 1
            tasks.append(
                ExecutionTask(
                    task_id,
                    step_id,
                    request.spec.request_id,
                    request.generation,
                    slot,
                    PROMPT if start < request.prefill_end else DECODE,
                    RECURRENT if depth else COMPOSITE_DEPTH0,
                    depth,
                    start,
                    count,
                    FULL_DEPTH if start < request.num_prompt_tokens else DECODE_DEPTH,
                    request.pages[start // page_size : (end - 1) // page_size + 1],
                )
            )
            slots.append(slot)
            starts.append(start)
            counts.append(count)
            depths.append(depth)
        self._tasks = task_id

    def add_coda(self, plan: StepPlan, request: Request, position: int, depth: int, action: CodaAction) -> None:
        """Append one coda row, for the hidden row of ``position`` at ``depth``."""
        self._tasks += 1
        request.in_flight += 1
        plan.coda_tasks.append(
            ExecutionTask(
                self._tasks,
                plan.step_id,
                request.spec.request_id,
                request.generation,
                request.slot,
                PROMPT if position < request.num_prompt_tokens else DECODE,
                CODA,
                depth,
                position,
                1,
                FULL_DEPTH if position < request.num_prompt_tokens else DECODE_DEPTH,
                [request.pages[position // self._page_size]],
            )
        )
        plan.coda_slot.append(request.slot)
        plan.coda_pos.append(position)
        plan.coda_depth.append(depth)
        plan.coda_action.append(action)
        plan.coda_features |= request.spec.coda_features
