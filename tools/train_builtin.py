"""Train the built-in model from nothing: ``python -m tools.train_builtin --out DIR``.

Needs no network: the corpus is the running Python's own text. Call it again with the same folder to go on after an
interruption. The package holds what one such run made (``wavegraph/builtin/model``); its card says how.
"""

import json
import os
import platform
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from tools.card import CARD_FILE, Facts, card
from tools.corpus import Corpus, encode, read_corpus, train_tokenizer
from tools.evaluation import evaluate
from tools.looped import LoopedModel
from tools.training import Recipe, Training
from wavegraph.errors import CheckpointError
from wavegraph.model.config import OuroConfig

CHECKPOINT_FILE = "checkpoint.pt"
SAVE_EVERY = 100  # steps

RECIPE = Recipe(steps=2100, gate_steps=300, batch=2, window=384, rate=4e-3, gate_rate=1e-2, beta=0.1, seed=2510_25741)

CONFIG: dict[str, Any] = {
    "architectures": ["OuroForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "early_exit_threshold": 1.0,
    "eos_token_id": 0,
    "head_dim": 32,
    "hidden_act": "silu",
    "hidden_size": 192,
    "initializer_range": 0.02,
    "intermediate_size": 512,
    "layer_types": ["full_attention"] * 2,
    "max_position_embeddings": 1024,
    "max_window_layers": 2,
    "model_type": "ouro",
    "num_attention_heads": 6,
    "num_hidden_layers": 2,
    "num_key_value_heads": 6,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "total_ut_steps": 4,
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 1024,
}
"""The built-in model's ``config.json``. Weights are stored in bfloat16 and run in float32."""


@click.command()
@click.option("--out", required=True, type=click.Path(path_type=Path, file_okay=False), help="Folder of the run.")
def main(out: Path) -> None:
    """Train the built-in model in a folder: config.json, tokenizer.json, model.safetensors and MODEL_CARD.md.

    An interrupted run goes on where it last saved; the folder keeps its checkpoint.pt.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        train(out, read_corpus(), CONFIG, RECIPE, Console(stderr=True))
    except (CheckpointError, OSError) as error:
        raise click.ClickException(str(error)) from error
    click.echo(f"wrote {out}")


def train(out: Path, corpus: Corpus, config: dict[str, Any], recipe: Recipe, console: Console) -> None:
    """The whole run, from the corpus to the card, with a progress bar on ``console``.

    Raises `CheckpointError` if ``out`` holds a run of something else, OSError if it cannot be written.
    """
    sizes = OuroConfig.from_dict(config)
    tokenizer = train_tokenizer((document.text for document in corpus.train), sizes.vocab_size)
    tokens = encode(tokenizer, corpus.train)
    compute = _fast_dtype()
    training = Training(sizes, recipe, torch.from_numpy(tokens), compute)
    surroundings = {
        "corpus": corpus.digest,
        "config": json.dumps(config),
        "compute": str(compute),
    }
    _advance(training, out / CHECKPOINT_FILE, surroundings, console)
    export(out, training.model, config, tokenizer)
    held_out = encode(tokenizer, corpus.held_out)
    judged = evaluate(load_exported(out, sizes), tokens, held_out, recipe.window, sizes.vocab_size)
    facts = Facts(
        recipe=recipe,
        config=config,
        python=platform.python_version(),
        torch=torch.__version__,
        compute=str(compute).removeprefix("torch."),
        cores=os.cpu_count() or 1,
        train_bytes=sum(len(document.text.encode()) for document in corpus.train),
        train_documents=len(corpus.train),
        train_tokens=len(tokens),
        held_out_bytes=sum(len(document.text.encode()) for document in corpus.held_out),
        held_out_modules=tuple(document.name for document in corpus.held_out if not document.name.startswith("doc/")),
        corpus_digest=corpus.digest,
        parameters=sum(weight.numel() for weight in training.model.parameters()),
        seconds=training.seconds,
        cpu_seconds=training.cpu_seconds,
    )
    (out / CARD_FILE).write_text(card(facts, judged), encoding="utf-8")


def export(out: Path, model: LoopedModel, config: dict[str, Any], tokenizer: Tokenizer) -> None:
    """Write ``config.json``, ``tokenizer.json`` and ``model.safetensors`` (bfloat16)."""
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (out / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
    tensors = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in model.state_dict().items()}
    save_file(tensors, out / "model.safetensors")


def load_exported(folder: Path, config: OuroConfig) -> LoopedModel:
    """The model of `export`, in float32."""
    model = LoopedModel(config, torch.float32)
    model.load_state_dict(load_file(folder / "model.safetensors"))
    return model


def _fast_dtype() -> torch.dtype:
    """bfloat16 where the processor multiplies it, else float32."""
    cpu = Path("/proc/cpuinfo")
    native = cpu.is_file() and {"avx512_bf16", "amx_bf16"} & set(cpu.read_text().split())
    return torch.bfloat16 if native else torch.float32


def _advance(training: Training, checkpoint: Path, surroundings: dict[str, str], console: Console) -> None:
    """Take all steps that are left, saving now and then."""
    if checkpoint.is_file():
        training.load(checkpoint, surroundings)
    columns = (
        TextColumn("stage {task.fields[stage]}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=training.recipe.total, stage="I", loss=training.loss)
        while not training.done:
            stage = "II" if training.in_gate_stage else "I"
            training.advance()
            bar.update(task, completed=training.step, stage=stage, loss=training.loss)
            if training.step % SAVE_EVERY == 0 or training.done:
                training.save(checkpoint, surroundings)


if __name__ == "__main__":
    main()
