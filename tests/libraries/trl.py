"""trl: pairs of answers of unequal length, put together by its collator, from which a model of transformers learns by DPO."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.functional import logsigmoid
from trl.trainer.dpo_trainer import DataCollatorForPreference
from trl.trainer.utils import selective_log_softmax

from ignite_train import ForwardOutput
from libraries.harness import Case, dealt
from libraries.transformers import VOCABULARY, adamw, gpt2, read_by, saved

BETA = 0.5


def pairs() -> list[Any]:
    """Answers of 1 to 6 tokens to prompts of 2 to 5, with what a reference says of them."""
    generator, collate, batches = torch.Generator().manual_seed(0), DataCollatorForPreference(pad_token_id=0), []

    def words(least: int, most: int) -> list[int]:
        length = int(torch.randint(least, most + 1, (1,), generator=generator))
        return torch.randint(1, VOCABULARY, (length,), generator=generator).tolist()

    for count in (3, 2, 4, 1, 3, 2, 3, 4):
        examples = [
            {
                "prompt_ids": words(2, 5),
                "chosen_ids": words(1, 6),
                "rejected_ids": words(1, 6),
                "ref_chosen_logps": -float(torch.rand(1, generator=generator)),
                "ref_rejected_logps": -float(torch.rand(1, generator=generator)),
            }
            for _ in range(count)
        ]
        batches.append(collate(examples))
    return batches


def forward(model: nn.Module, batch: Any) -> ForwardOutput:
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
    words = selective_log_softmax(logits, batch["input_ids"][:, 1:])
    chosen, rejected = (words * batch["completion_mask"][:, 1:]).sum(1).chunk(2)
    margin = chosen - batch["ref_chosen_logps"] - rejected + batch["ref_rejected_logps"]
    return ForwardOutput(-logsigmoid(BETA * margin).sum(), sample_size=len(margin))


CASES = [
    Case("DPO of GPT-2, pairs by its collator", gpt2, dealt(pairs), forward, adamw, writes=saved, reads=partial(read_by, gpt2))
]
