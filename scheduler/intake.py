"""Which requests can be served at all."""

from wavegraph.errors import RequestError
from wavegraph.scheduler.config import SchedulerConfig
from wavegraph.scheduler.plan import ExitRule, RequestSpec
from wavegraph.scheduler.request import Request, RequestSnapshot


def new_request(spec: RequestSpec, config: SchedulerConfig) -> Request:
    """A request at its start. Raises `RequestError` if the limits never let it be served."""
    name, prompt = spec.request_id, len(spec.prompt_token_ids)
    if prompt == 0:
        raise RequestError(f"prompt of request {name!r}: is empty; give at least one token")
    if prompt >= config.max_model_len:
        raise RequestError(
            f"prompt of request {name!r}: has {prompt} tokens, but max_model_len={config.max_model_len} allows "
            f"at most {config.max_model_len - 1} beside one output token; shorten it or raise max_model_len"
        )
    if spec.max_tokens < 1:
        raise RequestError(f"max_tokens of request {name!r}: must be at least 1, got {spec.max_tokens}")
    total = min(prompt + spec.max_tokens, config.max_model_len)
    needed = -(-(total - 1) // config.page_size)  # the last token sampled is never fed back
    if needed > config.num_pages:
        raise RequestError(
            f"request {name!r}: {prompt} prompt tokens and max_tokens={spec.max_tokens} need {needed} KV pages "
            f"of {config.page_size} tokens, but the pool has {config.num_pages}; shorten it or raise num_pages"
        )
    if spec.score_prompt and spec.exit_rule not in (None, ExitRule(config.depths - 1)):
        raise RequestError(
            f"request {name!r}: prompt log-probabilities are those of full depth; ask for them without early exit"
        )
    return Request(spec, config.depths, total, needed)


def restored_request(snapshot: RequestSnapshot, config: SchedulerConfig) -> Request:
    """A request in mid-life, as one that was swapped out. Raises `RequestError` as `new_request` does."""
    request = new_request(snapshot.spec, config)
    if len(snapshot.tokens) >= request.total_limit:
        raise RequestError(
            f"request {snapshot.spec.request_id!r}: has {len(snapshot.tokens)} tokens already, which "
            f"max_model_len={config.max_model_len} does not let go on; import it where that is larger"
        )
    request.restore(snapshot)
    return request
