"""The model card of the built-in model, filled in from what was measured."""

from dataclasses import dataclass
from typing import Any

from tools.evaluation import THRESHOLDS, Evaluation
from tools.training import Recipe

CARD_FILE = "MODEL_CARD.md"


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """How a model was made. Sizes in bytes of UTF-8, times in seconds over all steps."""

    recipe: Recipe
    config: dict[str, Any]
    python: str
    torch: str
    compute: str
    cores: int
    train_bytes: int
    train_documents: int
    train_tokens: int
    held_out_bytes: int
    held_out_modules: tuple[str, ...]
    corpus_digest: str
    parameters: int
    seconds: float
    cpu_seconds: float


def card(facts: Facts, judged: Evaluation) -> str:
    """The card's Markdown."""
    sections = (_model(facts), _data(facts, judged), _training(facts), _losses(judged), _exits(judged), _AGAIN)
    return "\n".join(sections)


_AGAIN = """\
## Make it again

    python -m tools.train_builtin --out DIR

An interrupted run goes on when it is called again. The weights come out the same, to the bit, only with the same
Python, PyTorch, processor and number of threads.
"""


def _model(facts: Facts) -> str:
    config, window = facts.config, facts.recipe.window
    heads = f"{config['num_attention_heads']} of {config['head_dim']}"
    return f"""\
# The built-in model

A small Ouro (arXiv 2510.25741), trained on the text that every Python installation ships. It is there so that Wavegraph
can be tried, tested and measured with no download: its text reads like Python's documentation and sources, and its gate
lets tokens leave after different numbers of loops. It knows nothing; do not ask it anything.

| | |
| --- | --- |
| layers, loops | {config["num_hidden_layers"]}, applied {config["total_ut_steps"]} times |
| hidden, feed-forward, heads | {config["hidden_size"]}, {config["intermediate_size"]}, {heads} |
| vocabulary | {config["vocab_size"]:,}, byte-level BPE trained on the same text |
| parameters | {facts.parameters:,}, stored in bfloat16, run in float32 |
| context | trained on windows of {window} tokens; takes {config["max_position_embeddings"]:,}, worse beyond {window} |
"""


def _data(facts: Facts, judged: Evaluation) -> str:
    modules = "\n".join(f"`{name}`" for name in facts.held_out_modules)
    return f"""\
## Data

The language reference behind `help()`, the licence, the documentation strings and the sources of the standard library
of Python {facts.python}, without tests, IDLE, tkinter and encodings (`tools/corpus.py` says exactly what):
{facts.train_documents:,} documents, {facts.train_bytes / 1e6:.2f} MB, {facts.train_tokens:,} tokens.
SHA-256 of the corpus: `{facts.corpus_digest}`.

Held out, by a hash of the module's name, and seen by neither tokenizer nor model: {len(facts.held_out_modules)}
modules, {facts.held_out_bytes / 1e6:.2f} MB, {judged.tokens:,} tokens.

{modules}

The text is under the Python Software Foundation License; it is not part of this package.
"""


def _training(facts: Facts) -> str:
    recipe = facts.recipe
    seen = recipe.steps * recipe.batch * recipe.window
    amount = f"{seen / 1e6:.2f} M tokens in all ({seen / facts.train_tokens:.2f} epochs)"
    return f"""\
## Training

- Stage I, all weights: {recipe.steps:,} steps of {recipe.batch} windows of {recipe.window} tokens,
  {amount}. The loss of every depth, weighted by the learned exit distribution,
  less {recipe.beta} times its entropy (section 3.3).
- Stage II, the gate alone: {recipe.gate_steps:,} steps of the same size (section 3.4: slope 50, threshold 0.005 nats).
- AdamW, highest learning rates {recipe.rate} and {recipe.gate_rate}, warm-up, cosine, weight decay 0.1, gradients
  clipped to norm 1; seed {recipe.seed}.
- PyTorch {facts.torch} on a CPU with {facts.cores} cores, matrix products in {facts.compute}, all else in float32:
  {facts.cpu_seconds / 60:.1f} minutes of CPU time in {facts.seconds / 60:.1f} minutes{_shared(facts)}.
"""


def _losses(judged: Evaluation) -> str:
    rows = (f"| {d + 1} | {loss:.3f} | {loss / judged.unigram:.1%} |" for d, loss in enumerate(judged.by_depth))
    return f"""\
## Held-out loss

Nats a token, in float32, over the same {judged.tokens:,} tokens. A unigram model (token frequencies of the training
text) has {judged.unigram:.3f}.

| leaving after loop | loss | of the unigram model's |
| --- | --- | --- |
{chr(10).join(rows)}
"""


def _exits(judged: Evaluation) -> str:
    rows = []
    for threshold, spread, loss in zip(THRESHOLDS, judged.spread, judged.at_threshold, strict=True):
        mean = sum(share * (depth + 1) for depth, share in enumerate(spread))
        rows.append(f"| {threshold} | {' | '.join(f'{share:.1%}' for share in spread)} | {mean:.2f} | {loss:.3f} |")
    loops = range(1, len(judged.by_depth) + 1)
    return f"""\
## Exits

Share of the held-out tokens that leave after each loop when the gate decides, and the loss of leaving there:

| threshold | {" | ".join(f"loop {loop}" for loop in loops)} | mean loops | loss |
| --- |{" --- |" * len(loops)} --- | --- |
{chr(10).join(rows)}
"""


def _shared(facts: Facts) -> str:
    """A remark, where the machine had other work too."""
    had = facts.cpu_seconds / facts.seconds
    return f", on a machine that was busy with other work: {had:.1f} cores were had" if had < 0.8 * facts.cores else ""
