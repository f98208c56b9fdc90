"""Group relative policy optimization (arXiv:2402.03300): a small language model is rewarded for each word that counts on.

    python examples/programs/grpo.py
    torchrun --nproc_per_node=2 examples/programs/grpo.py

A micro-batch is the answers to one prompt. The advantage of an answer is its reward compared with those of the others, so no
second network guesses values. Each update samples with the model of the moment, one update to a rollout. The mean is one over
all words of all answers. The penalty keeps the model near the one of the beginning.
"""

import torch
from torch import Tensor, nn

from dpo import LENGTH, WORDS, Speaker, build
from ignite_train import ForwardOutput, UpdateOptions, create_trainer
from workbench import GROUP, Trained, mine, start

ANSWERS, PENALTY = 32, 0.02


def answer(speaker: nn.Module, seed: int) -> tuple[Tensor, Tensor]:
    """Answers to the prompt of this number, its word first, and their rewards: how many words count on, of all."""
    generator = torch.Generator().manual_seed(seed)
    texts = torch.full((ANSWERS, 1), seed % WORDS)
    while texts.shape[1] < LENGTH:
        with torch.no_grad():
            likely = speaker(texts)[:, -1].softmax(-1)
        texts = torch.cat([texts, torch.multinomial(likely, 1, generator=generator)], dim=1)
    counts_on = texts[:, 1:] == (texts[:, :-1] + 1) % WORDS
    return texts, counts_on.to(torch.get_default_dtype()).mean(1)


def policy_loss(speaker: nn.Module, reference: nn.Module, rollout: tuple[Tensor, Tensor]) -> Tensor:
    """The sum over words of the policy's gradient and of the penalty, whose estimate is never negative."""
    texts, rewards = rollout
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    words = texts[:, 1:, None]
    log_p = speaker(texts[:, :-1]).log_softmax(-1).gather(-1, words)[..., 0]
    with torch.no_grad():
        log_q = reference(texts[:, :-1]).log_softmax(-1).gather(-1, words)[..., 0]
    ratio, apart = (log_p - log_p.detach()).exp(), log_q - log_p
    return (PENALTY * (apart.exp() - apart - 1) - ratio * advantages[:, None]).sum()


def train(num_updates: int = 120) -> Trained:
    """Returns the model, and the mean reward of each update."""
    (speaker, optimizer), (reference, _) = build(), build()

    def forward(speaker: Speaker, rollout: tuple[Tensor, Tensor]) -> ForwardOutput:
        texts, rewards = rollout
        size = texts[:, 1:].numel()
        return ForwardOutput(policy_loss(speaker, reference, rollout), size, {"reward": rewards.sum()})

    trainer = create_trainer(speaker, optimizer, forward, options=UpdateOptions(reduction="explicit"))
    rewards = []
    with trainer.session() as state:
        while state.iteration < num_updates:
            prompts = range(GROUP * state.iteration, GROUP * (state.iteration + 1))
            record = trainer.update([answer(speaker, prompt) for prompt in mine(list(prompts))])
            rewards.append(record.logs["reward"] / (GROUP * ANSWERS))
    return speaker, rewards


if __name__ == "__main__":
    start(train, "reward")
