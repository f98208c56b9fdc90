"""The loops of examples/programs in plain torch, on one process: what a reader would write without the library.

Each takes the program, whose model, data and losses it uses, and the number of updates. It returns what the program's `train`
returns. `BY_HAND` lists them by the names of the programs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import cycle
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy, mse_loss, softplus
from torch.nn.utils import clip_grad_norm_

GROUP = 2  # micro-batches to an update

Trained = tuple[nn.Module, list[float]]
ByHand = Callable[[Any, int], Trained]

BY_HAND: dict[str, ByHand] = {}


def _listed(function: ByHand) -> ByHand:
    BY_HAND[function.__name__] = function
    return function


def groups(data: list[Any], num_updates: int) -> list[list[Any]]:
    """The micro-batches of each update; the data begin again when they end."""
    starts = range(0, len(data), GROUP)
    return [data[first : first + GROUP] for first, _ in zip(cycle(starts), range(num_updates), strict=False)]


def _divide_gradients(model: nn.Module, size: float) -> None:
    """Makes the mean gradient of the sum."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad /= size


@_listed
def dcgan(program: Any, num_updates: int) -> Trained:
    g_net, d_net, g_optimizer, d_optimizer = program.build()
    losses = []
    for group in groups(program.data(), num_updates):
        size = sum(len(real) for (real,) in group)
        made = [g_net(torch.randn(len(real), program.NOISE, 1, 1)) for (real,) in group]
        d_optimizer.zero_grad()
        total = 0.0
        for (real,), one in zip(group, made, strict=True):
            loss = program.judged(d_net(real), 1.0) + program.judged(d_net(one.detach()), 0.0)
            loss.backward()
            total += loss.item()
        _divide_gradients(d_net, size)
        d_optimizer.step()
        losses.append(total / size)
        g_optimizer.zero_grad()
        for one in made:
            program.judged(d_net(one), 1.0).backward()
        _divide_gradients(g_net, size)
        g_optimizer.step()
    return nn.ModuleDict({"g": g_net, "d": d_net}), losses


@_listed
def wgan_gp(program: Any, num_updates: int) -> Trained:
    g_net, critic, g_optimizer, c_optimizer = program.build()
    losses, more = [], program.groups()
    for _ in range(num_updates):
        for _ in range(program.CRITIC_UPDATES):
            group = next(more)
            c_optimizer.zero_grad()
            for real, noise, between in group:
                made = g_net(noise).detach()
                slopes = program.penalty(critic, torch.lerp(real, made, between))
                ((critic(made) - critic(real)).sum() + program.PENALTY * slopes).backward()
            _divide_gradients(critic, sum(len(real) for real, *_ in group))
            c_optimizer.step()
        group, total = next(more), 0.0
        size = sum(len(real) for real, *_ in group)
        g_optimizer.zero_grad()
        for _, noise, _ in group:
            loss = -critic(g_net(noise)).sum()
            loss.backward()
            total += loss.item()
        _divide_gradients(g_net, size)
        g_optimizer.step()
        losses.append(total / size)
    return nn.ModuleDict({"g": g_net, "critic": critic}), losses


@_listed
def reinforce(program: Any, num_updates: int) -> Trained:
    policy, optimizer = program.build()
    steps = []
    for update in range(num_updates):
        episodes = [program.play(policy, seed) for seed in range(program.GROUP * update, program.GROUP * (update + 1))]
        optimizer.zero_grad()
        for episode in episodes:
            program.surrogate(policy, episode).backward()
        optimizer.step()
        steps.append(sum(len(states) for states, *_ in episodes) / program.GROUP)
    return policy, steps


@_listed
def time_sequence(program: Any, num_updates: int) -> Trained:
    model, optimizer = program.build()
    full_batch, losses = program.data(), []
    size = sum(following.numel() for _, following in full_batch)

    def closure() -> float:
        optimizer.zero_grad()
        total = 0.0
        for waves, following in full_batch:
            loss = mse_loss(model(waves), following, reduction="sum")
            loss.backward()
            total += loss.item()
        _divide_gradients(model, size)
        return total / size

    for _ in range(num_updates):
        losses.append(optimizer.step(closure))
    return model, losses


@_listed
def sam(program: Any, num_updates: int) -> Trained:
    model, optimizer = program.build()
    losses = []
    for group in groups(program.data(), num_updates):
        size = sum(len(classes) for _, classes in group)

        def closure(group: Any = group, size: int = size) -> float:
            optimizer.zero_grad()
            total = 0.0
            for images, classes in group:
                loss = cross_entropy(model(images), classes, reduction="sum")
                loss.backward()
                total += loss.item()
            _divide_gradients(model, size)
            return total / size

        losses.append(optimizer.step(closure))
    return model, losses


@_listed
def muon_adamw(program: Any, num_updates: int) -> Trained:
    model, optimizers, schedules = program.build()
    losses = []
    for group in groups(program.data(), num_updates):
        size = sum(following.numel() for _, following in group)
        total = 0.0
        for optimizer in optimizers.values():
            optimizer.zero_grad()
        for text, following in group:
            loss = cross_entropy(model(text).transpose(1, 2), following, reduction="sum")
            loss.backward()
            total += loss.item()
        _divide_gradients(model, size)
        clip_grad_norm_(model.parameters(), program.MAX_NORM)
        for optimizer, schedule in zip(optimizers.values(), schedules, strict=True):
            optimizer.step()
            schedule.step()
        losses.append(total / size)
    return model, losses


@_listed
def word2vec(program: Any, num_updates: int) -> Trained:
    model, optimizer = program.build()
    losses = []
    for group in groups(program.data(), num_updates):
        size = sum(len(middle) for middle, _ in group)
        total = 0.0
        optimizer.zero_grad()
        for middle, candidates in group:
            loss = program.surprise(model(middle, candidates))
            loss.backward()
            total += loss.item()
        _divide_gradients(model, size)
        optimizer.step()
        losses.append(total / size)
    return model, losses


@_listed
def word_lstm(program: Any, num_updates: int) -> Trained:
    model, optimizer = program.build()
    losses: list[float] = []
    data = program.data()
    for group in groups(data, num_updates):
        if len(losses) % (len(data) // len(group)) == 0:  # an epoch begins
            hidden = [None] * len(group)
        size = sum(following.numel() for _, following in group)
        total = 0.0
        optimizer.zero_grad()
        for place, (text, following) in enumerate(group):
            logits, last = model(text, hidden[place])
            hidden[place] = tuple(part.detach() for part in last)
            loss = cross_entropy(logits.transpose(1, 2), following, reduction="sum")
            loss.backward()
            total += loss.item()
        _divide_gradients(model, size)
        clip_grad_norm_(model.parameters(), program.MAX_NORM)
        optimizer.step()
        losses.append(total / size)
    return model, losses


@_listed
def lora(program: Any, num_updates: int) -> Trained:
    model, optimizer = program.build()
    losses: list[float] = []
    for group in groups(program.data(), num_updates):
        model[-1].requires_grad_(len(losses) >= program.THAWED_AFTER)
        size = sum(len(classes) for _, classes in group)
        total = 0.0
        optimizer.zero_grad()
        for images, classes in group:
            loss = cross_entropy(model(images), classes, reduction="sum")
            loss.backward()
            total += loss.item()
        _divide_gradients(model, size)
        optimizer.step()
        losses.append(total / size)
    return model, losses


@_listed
def dino(program: Any, num_updates: int) -> Trained:
    student, teacher, optimizer = program.build()
    centre, losses = torch.zeros(program.ANSWERS), []
    for update, group in enumerate(groups(program.data(), num_updates)):
        size = sum(len(long) for long, _ in group)
        total, seen = 0.0, torch.zeros(program.ANSWERS)
        optimizer.zero_grad()
        for crops in group:
            with torch.no_grad():
                taught = program.answers(teacher, crops[0])
            seen += taught.sum(dim=(0, 1))
            targets = ((taught - centre) / program.temperature(update / num_updates)).softmax(dim=2)
            said = torch.cat([program.answers(student, one) for one in crops])
            loss = program.disagreement(said, targets)
            loss.backward()
            total += loss.item()
        _divide_gradients(student, size)
        for parameter in student.parameters():
            clip_grad_norm_(parameter, program.MAX_NORM)
        if update < program.HELD_UPDATES:
            student[-1].weight.grad = None
        optimizer.step()
        centre = 0.9 * centre + 0.1 * seen / (2 * size)
        with torch.no_grad():
            for follows, leads in zip(teacher.parameters(), student.parameters(), strict=True):
                follows.mul_(program.MOMENTUM).add_(leads, alpha=1 - program.MOMENTUM)
        losses.append(total / size)
    return teacher, losses


@_listed
def clip(program: Any, num_updates: int) -> Trained:
    model, optimizer = program.build()
    losses = []
    for group in groups(program.data(), num_updates):
        with torch.no_grad():
            known = [model(*micro_batch) for micro_batch in group]
        optimizer.zero_grad()
        for place, micro_batch in enumerate(group):
            features = torch.cat([*known[:place], model(*micro_batch), *known[place + 1 :]], dim=1)
            scale = torch.lerp(model.scale.detach(), model.scale, 1 / len(group))
            loss = program.contrast(features, scale)
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model, losses


def clip_uncut(program: Any, num_updates: int) -> Trained:
    """The whole batch at once, where nothing has to take its place among the others."""
    model, optimizer = program.build()
    losses = []
    for group in groups(program.data(), num_updates):
        waves, texts = (torch.cat(parts) for parts in zip(*group, strict=True))
        optimizer.zero_grad()
        loss = program.contrast(model(waves, texts), model.scale)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model, losses


@_listed
def vae(program: Any, num_updates: int) -> Trained:
    model, optimizer = program.build()
    losses = []
    for update, group in enumerate(groups(program.data(), num_updates)):
        total = 0.0
        optimizer.zero_grad()
        for images, noise in group:
            made, mean, log_variance = model(images, noise)
            error = mse_loss(made, images, reduction="sum")
            loss = error + program.weight(update / num_updates) * program.divergence(mean, log_variance)
            loss.backward()
            total += loss.item()
        optimizer.step()
        losses.append(total / sum(len(images) for images, _ in group))
    return model, losses


@_listed
def maml(program: Any, num_updates: int) -> Trained:
    model, optimizer = program.build()
    losses = []
    for group in groups(program.data(num_updates), num_updates):
        tasks = [task for micro_batch in group for task in micro_batch]
        optimizer.zero_grad()
        total = 0.0
        for x, y, x_new, y_new in tasks:
            loss = mse_loss(functional_call(model, program.adapted(model, x, y), x_new), y_new)
            loss.backward()
            total += loss.item()
        _divide_gradients(model, len(tasks))
        optimizer.step()
        losses.append(total / len(tasks))
    return model, losses


@_listed
def ppo(program: Any, num_rounds: int) -> Trained:
    net, optimizer = program.build()
    walkers, rewards = program.Walkers(), []
    while walkers.rounds < num_rounds:
        rollout, reward = program.collect(net, walkers)
        for group in program.groups(rollout):
            size = sum(len(states) for states, *_ in group)
            total = 0.0
            optimizer.zero_grad()
            for samples in group:
                loss, moved = program.clipped(net, samples)
                loss.backward()
                total += moved.item()
            _divide_gradients(net, size)
            clip_grad_norm_(net.parameters(), 0.5)
            optimizer.step()
            if total > program.MAX_KL * size:
                break
        walkers.rounds += 1
        rewards.append(reward)
    return net, rewards


@_listed
def prioritised_replay(program: Any, num_rounds: int) -> Trained:
    net, target, optimizer = program.build()
    memory, losses = program.Memory(), []
    while memory.rounds < num_rounds:
        while memory.written < 100 + memory.rounds:
            memory.walk(net)
        group = memory.sample(memory.rounds / num_rounds)
        size = sum(len(indices) for indices, *_ in group)
        total, found = 0.0, []
        optimizer.zero_grad()
        for indices, transitions, weights in group:
            errors = program.surprises(net, target, transitions)
            loss = program.weighted(errors, weights)
            loss.backward()
            total += loss.item()
            found.append((indices, errors.detach()))
        _divide_gradients(net, size)
        optimizer.step()
        for indices, errors in found:
            memory.learn(indices, errors)
        memory.rounds += 1
        if memory.rounds % program.SYNC_EVERY == 0:
            target.load_state_dict(net.state_dict())
        losses.append(total / size)
    return net, losses


# --- the batch of an update is not cut in these ---


def uncut(group: list[Any]) -> list[torch.Tensor]:
    """The micro-batches of an update as one."""
    return [torch.cat(parts) for parts in zip(*group, strict=True)]


@_listed
def bert(program: Any, num_updates: int) -> Trained:
    model, optimizer = program.build()
    losses = []
    for group in groups(program.data(), num_updates):
        text, masked, follows = uncut(group)
        of_words, of_pairs = program.losses_of_both(model, text, masked, follows)
        loss = of_words / (masked != program.IGNORED).sum() + of_pairs / len(follows)
        optimizer.zero_grad()
        loss.backward()
        clip_grad_norm_(model.parameters(), program.MAX_NORM)
        optimizer.step()
        losses.append(loss.item())
    return model, losses


@_listed
def fixmatch(program: Any, num_updates: int) -> Trained:
    model, optimizer = program.build()
    losses = []
    for group in groups(program.data(), num_updates):
        images, classes, weak, strong = uncut(group)
        loss = program.supervised(model, images, classes) / len(images)
        loss += program.consistent(model, weak, strong) / len(weak)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model, losses


@_listed
def pcgrad(program: Any, num_updates: int) -> Trained:
    model, optimizer = program.build()
    losses, shared = [], [*model.body.parameters()]
    for update, group in enumerate(groups(program.data(), num_updates), start=1):
        images, labels = uncut(group)
        known = (labels != program.UNKNOWN).sum(0)
        of_tasks = program.task_losses(model, images, labels)
        means = {name: loss / number for (name, loss), number in zip(of_tasks.items(), known, strict=True)}
        taken = {name: torch.autograd.grad(mean, shared, retain_graph=True) for name, mean in means.items()}
        optimizer.zero_grad()
        sum(means.values()).backward()  # type: ignore[union-attr]
        vector = program.project({name: torch.cat([one.flatten() for one in parts]) for name, parts in taken.items()}, update)
        for parameter, part in zip(shared, vector.split([one.numel() for one in shared]), strict=True):
            parameter.grad = part.view_as(parameter)
        optimizer.step()
        losses.append(sum(means.values()).item())  # type: ignore[union-attr]
    return model, losses


@_listed
def dp_sgd(program: Any, num_updates: int) -> Trained:
    """Sample by sample."""
    model, optimizer = program.build()
    losses = []
    for update, group in enumerate(program.batches(num_updates), start=1):
        images, classes = uncut(group)
        summed, total = [torch.zeros_like(parameter) for parameter in model.parameters()], 0.0
        for image, label in zip(images.split(1), classes.split(1), strict=True):
            optimizer.zero_grad()
            loss = cross_entropy(model(image), label)
            loss.backward()
            total += loss.item()
            norm = torch.cat([parameter.grad.flatten() for parameter in model.parameters()]).norm()  # type: ignore[union-attr]
            for one, parameter in zip(summed, model.parameters(), strict=True):
                one += parameter.grad * min(1.0, program.MAX_NORM / norm)  # type: ignore[operator]
        for parameter, one, noise in zip(model.parameters(), summed, program.noise(model, update), strict=True):
            parameter.grad = one / program.EXPECTED + noise
        optimizer.step()
        losses.append(total / program.EXPECTED)
    return model, losses


@_listed
def stylegan2(program: Any, num_rounds: int) -> Trained:
    g_net, d_net, g_optimizer, d_optimizer = program.build()
    average, length, losses = copy.deepcopy(g_net), 0.0, []

    def step(loss: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    for number, group in enumerate(groups(program.data(), num_rounds)):
        (real,) = uncut(group)
        noise, direction = uncut(program.draw(group))
        loss = softplus(-d_net(real)).mean() + softplus(d_net(g_net(noise).detach())).mean()
        step(loss, d_optimizer)
        losses.append(loss.item())
        if number % program.D_EVERY == 0:
            step(program.slopes(d_net, real) / len(real), d_optimizer)
        step(softplus(-d_net(g_net(noise))).mean(), g_optimizer)
        with torch.no_grad():
            for follows, leads in zip(average.parameters(), g_net.parameters(), strict=True):
                follows.lerp_(leads, 1 - program.AVERAGED)
        if number % program.G_EVERY == 0:
            lengths = program.path_lengths(g_net, noise, direction)
            step(program.PATH * program.G_EVERY * (lengths - length).square().mean(), g_optimizer)
            length += (1 - program.DECAY) * (lengths.mean().item() - length)
    return nn.ModuleDict({"d": d_net, "g": average}), losses


@_listed
def dpo(program: Any, num_updates: int) -> Trained:
    speaker, optimizer = program.build()
    losses = []
    for group in groups(program.data(speaker), num_updates):
        size = sum(len(chosen) for chosen, *_ in group)
        total = 0.0
        optimizer.zero_grad()
        for pairs in group:
            loss, _ = program.preference_loss(speaker, pairs)
            loss.backward()
            total += loss.item()
        _divide_gradients(speaker, size)
        optimizer.step()
        losses.append(total / size)
    return speaker, losses


@_listed
def grpo(program: Any, num_updates: int) -> Trained:
    (speaker, optimizer), (reference, _) = program.build(), program.build()
    rewards = []
    for update in range(num_updates):
        prompts = range(program.GROUP * update, program.GROUP * (update + 1))
        rollouts = [program.answer(speaker, prompt) for prompt in prompts]
        optimizer.zero_grad()
        for rollout in rollouts:
            program.policy_loss(speaker, reference, rollout).backward()
        _divide_gradients(speaker, sum(texts[:, 1:].numel() for texts, _ in rollouts))
        optimizer.step()
        rewards.append(sum(reward.mean().item() for _, reward in rollouts) / len(rollouts))
    return speaker, rewards
