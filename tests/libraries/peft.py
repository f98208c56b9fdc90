"""peft: adapters on a frozen language model."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import IA3Config, LoraConfig, get_peft_model, set_peft_model_state_dict
from safetensors.torch import load_file
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

from ignite_train import ForwardOutput
from ignite_train.checkpoint import consolidate
from libraries.harness import Case, dealt, seed

VOCABULARY = 40


def llama() -> nn.Module:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=16, **sizes))


def with_adapter(config: Any) -> Any:
    return lambda: get_peft_model(llama(), config)


def sentences() -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    return [{"input_ids": torch.randint(VOCABULARY, (n, 9), generator=generator)} for n in (3, 2, 4, 1, 3, 2, 3, 4)]


def forward(model: nn.Module, batch: Any) -> ForwardOutput:
    targets = batch["input_ids"][:, 1:]
    logits = model(**batch).logits[:, :-1]
    return ForwardOutput(cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"), targets.numel())


def read_by_peft(make: Any, file: Path) -> nn.Module:
    """The frozen weights are those of the seed; the others come from a file that holds nothing else."""
    adapters = file.with_name("adapter_model.safetensors")
    consolidate(file.with_name("alone"), adapters, trained_only=True)
    seed(0)
    model = make()
    state = load_file(adapters)
    assert state.keys() == {name for name, one in model.named_parameters() if one.requires_grad}
    with torch.no_grad():
        for name in state:
            model.get_parameter(name).zero_()
    plain = {name.replace(".default", "").replace(".modules_to_save", ""): value for name, value in state.items()}
    set_peft_model_state_dict(model, plain)
    return model


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-2)


ATTENTION = ["q_proj", "v_proj"]
CONFIGS = {
    "LoRA": LoraConfig(r=4, target_modules=ATTENTION, task_type="CAUSAL_LM"),
    "DoRA": LoraConfig(r=4, target_modules=ATTENTION, use_dora=True, task_type="CAUSAL_LM"),
    "LoRA with embeddings and head": LoraConfig(
        r=4, target_modules=ATTENTION, modules_to_save=["embed_tokens", "lm_head"], task_type="CAUSAL_LM"
    ),
    "rsLoRA": LoraConfig(r=4, target_modules=ATTENTION, use_rslora=True, task_type="CAUSAL_LM"),
    "IA3": IA3Config(
        target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"], task_type="CAUSAL_LM"
    ),
}

MAKES = {name: with_adapter(config) for name, config in CONFIGS.items()}
CASES = [
    Case(f"{name} on a Llama", make, dealt(sentences), forward, adamw, reads=partial(read_by_peft, make))
    for name, make in MAKES.items()
]
