"""transformers: language models with ragged batches and tied weights, gradient checkpointing, generation in the evaluation."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from ignite.engine import Events
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import (
    BatchEncoding,
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    get_cosine_schedule_with_warmup,
)

from ignite_train import Evaluator, ForwardOutput, Trainer
from libraries.harness import HALVED, Around, Attached, Case, dealt

IGNORED = -100
VOCABULARY = 40
SMALL = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}


def bert() -> nn.Module:
    return BertForMaskedLM(
        BertConfig(**SMALL, max_position_embeddings=16, hidden_dropout_prob=0, attention_probs_dropout_prob=0)
    )


def gpt2(**settings: Any) -> nn.Module:
    sizes = {"vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16}
    return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, **settings))


def llama() -> nn.Module:
    model = LlamaForCausalLM(LlamaConfig(**SMALL, num_key_value_heads=1, max_position_embeddings=16))
    model.gradient_checkpointing_enable()
    return model


def t5() -> nn.Module:
    sizes = {"vocab_size": VOCABULARY, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(**sizes, dropout_rate=0, decoder_start_token_id=0))


def ragged(*, masks: bool = False) -> list[Any]:
    """Sentences of 3 to 12 tokens, padded; one in five tokens is to be found again where `masks`."""
    generator, batches = torch.Generator().manual_seed(0), []
    for count in (3, 2, 4, 1, 3, 2, 3, 4):
        lengths = torch.randint(3, 13, (count, 1), generator=generator)
        tokens = torch.randint(4, VOCABULARY, (count, int(lengths.max())), generator=generator)
        mask = torch.arange(tokens.shape[1]) < lengths
        chosen = mask & (torch.rand(tokens.shape, generator=generator) < 0.2 if masks else mask)
        chosen[:, 1] = True
        entries = {"input_ids": tokens.masked_fill(~mask | (chosen if masks else ~mask), 3), "attention_mask": mask.long()}
        batches.append(BatchEncoding({**entries, "labels": tokens.masked_fill(~chosen, IGNORED)}))
    return batches


def forward(model: nn.Module, batch: Any, shift: int = 0) -> ForwardOutput:
    labels = batch["labels"][:, shift:]
    logits = model(**batch).logits[:, : labels.shape[1]]
    loss = cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
    return ForwardOutput(loss, (labels != IGNORED).sum().item())


def as_the_library_sums(model: nn.Module, batch: Any) -> ForwardOutput:
    size = (batch["labels"][:, 1:] != IGNORED).sum()
    return ForwardOutput(model(**batch, num_items_in_batch=1).loss, size.item())


def with_schedule(model: nn.Module, optimizer: Any) -> Around:
    schedule = get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=2, num_training_steps=16)
    return Around(schedule.step, {"schedule": schedule})


def generates(trainer: Trainer, evaluator: Evaluator) -> Attached:
    written: list[torch.Tensor] = []
    prompt = torch.tensor([[5, 6, 7]])

    @evaluator.on(Events.COMPLETED)
    def write(evaluator: Evaluator) -> None:
        model = trainer.model
        written.append(
            model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=4, do_sample=False, pad_token_id=0)
        )

    def look() -> None:
        assert [tokens.shape[0] for tokens in written] == [1] * len(written) != []

    return Attached(look)


def saved(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder / "model.safetensors"


def in_shards(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder, max_shard_size="4KB")
    return folder


def read_by(make: Any, file: Path) -> nn.Module:
    model = make()
    model.config.save_pretrained(file.parent / "hub")
    return type(model).from_pretrained(file.parent / "hub", dtype=torch.float64)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


causal = partial(forward, shift=1)

CASES = [
    Case(
        "masked language model (BERT, tied)",
        bert,
        dealt(partial(ragged, masks=True)),
        forward,
        adamw,
        writes=saved,
        reads=partial(read_by, bert),
    ),
    Case(
        "causal language model (GPT-2, tied), schedule, generate",
        gpt2,
        dealt(ragged),
        causal,
        adamw,
        with_schedule,
        generates,
        writes=saved,
        reads=partial(read_by, gpt2),
    ),
    Case("GPT-2 with the model's own loss, summed", gpt2, dealt(ragged), as_the_library_sums, adamw, writes=in_shards),
    Case(
        "Llama, gradient checkpointing",
        llama,
        dealt(ragged),
        causal,
        adamw,
        attach=generates,
        writes=in_shards,
        reads=partial(read_by, llama),
    ),
    Case(
        "GPT-2, a BatchEncoding halved where memory runs out",
        gpt2,
        dealt(ragged),
        causal,
        options=HALVED,
        has_room=lambda batch: len(batch["labels"]) < 3,
    ),
    Case("T5, encoder and decoder, tied", t5, dealt(ragged), forward, adamw, writes=saved, reads=partial(read_by, t5)),
]
