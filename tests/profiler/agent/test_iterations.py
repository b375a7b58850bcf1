"""The ends of iterations, from the order of backwards and steps alone."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from ebbtide.profiler.agent.iteration_rule import IterationRule


class FakeParameter:
    """A fake parameter: the rule uses its identity only."""


class FakeOptimizer:
    """A fake optimizer, with parameters of its own unless they are given."""

    def __init__(self, *parameters: FakeParameter) -> None:
        self.param_groups = [{"params": list(parameters) or [FakeParameter()]}]


class FakeJob:
    """Plays a training loop written as words: `b` is a backward, other letters are the
    optimizers of one update."""

    def __init__(self) -> None:
        self.rule = IterationRule()
        self.optimizers: dict[str, FakeOptimizer] = {}
        self.backwards = 0

    def play(self, words: str | Iterable[str]) -> list[int | None]:
        """Play a loop and return the iteration that each update ends."""
        ended = []
        for word in words.split() if isinstance(words, str) else words:
            if word == "b":
                self.backwards += 1
            else:
                stepping = [
                    self.optimizers.setdefault(name, FakeOptimizer()) for name in word
                ]
                ended.append(self.rule.add_update(stepping, self.backwards))
        return ended


def ended(words: str | Iterable[str]) -> list[int | None]:
    return FakeJob().play(words)


def test_iteration_rule__counts_one_per_step_in_a_plain_loop() -> None:
    assert ended("b A b A b A") == [0, 1, 2]


def test_iteration_rule__adds_none_for_gradient_accumulation() -> None:
    assert ended("b b b b A b b b b A") == [0, 1]


def test_iteration_rule__counts_one_for_both_optimizers_of_a_gan() -> None:
    assert ended("b D b G b D b G b D b G") == [0, 0, 1, 1, 2, 2]


def test_iteration_rule__counts_one_for_a_gan_with_one_backward() -> None:
    assert ended("b D G b D G") == [0, 0, 1, 1]


def test_iteration_rule__counts_each_of_five_discriminator_steps() -> None:
    assert ended("b D " * 5 + "b G " + "b D " * 5 + "b G") == [
        0,
        1,
        2,
        3,
        4,
        4,
        5,
        6,
        7,
        8,
        9,
        9,
    ]


def test_iteration_rule__adds_none_for_an_optimizer_that_steps_rarely() -> None:
    assert ended("b A b A B b A b A B") == [0, 1, 1, 2, 3, 3]


def test_iteration_rule__extends_by_steps_without_a_backward() -> None:
    assert ended("b A A A A b A A A A") == [0, 0, 0, 0, 1, 1, 1, 1]
    assert ended("b A AB b AB") == [0, 0, 1]


def test_iteration_rule__ignores_steps_before_any_backward() -> None:
    assert ended("A A b A b A") == [None, None, 0, 1]
    assert ended("AB A b B") == [None, None, 0]


def test_iteration_rule__counts_one_for_a_step_of_lbfgs() -> None:
    assert ended("b b b b b L b b b L b L") == [0, 1, 2]


def test_iteration_rule__counts_one_per_backward_with_an_optimizer_per_parameter() -> (
    None
):
    assert ended("b A B C D b A B C D b D C B A") == [0] * 4 + [1] * 4 + [2] * 4


def test_iteration_rule__counts_one_for_optimizers_in_one_update() -> None:
    assert ended("b AB b AB b BA") == [0, 1, 2]


def test_iteration_rule__ignores_an_update_without_optimizers() -> None:
    job = FakeJob()
    assert job.rule.add_update([], 3) is None
    assert job.play("b A") == [0]
    assert job.rule.add_update([], 9) == 0
    assert job.play("b A") == [1]


def test_iteration_rule__continues_with_a_new_optimizer() -> None:
    job = FakeJob()
    assert job.play("b A b A") == [0, 1]
    old = weakref.ref(job.optimizers.pop("A"))
    gc.collect()
    assert old() is None  # the rule keeps no optimizer alive
    assert job.play("b B b B b B") == [2, 3, 4]


def test_iteration_rule__counts_one_per_optimizer_of_the_same_parameters() -> None:
    rule, parameter = IterationRule(), FakeParameter()
    optimizers = [FakeOptimizer(FakeParameter(), parameter) for _ in range(4)]
    assert [
        rule.add_update([optimizer], 1 + n) for n, optimizer in enumerate(optimizers)
    ] == [0, 1, 2, 3]
    # Two of them step after one backward.
    assert [rule.add_update([optimizer], 5) for optimizer in optimizers[:2]] == [4, 4]


def test_iteration_rule__sees_the_parameters_of_a_group_that_is_added() -> None:
    rule, parameter = IterationRule(), FakeParameter()
    first, second = FakeOptimizer(parameter), FakeOptimizer()
    assert [rule.add_update([second], 1), rule.add_update([first], 2)] == [0, 0]
    second.param_groups.append({"params": [parameter]})
    assert [rule.add_update([second], 3), rule.add_update([first], 4)] == [1, 2]


def test_iteration_rule__takes_no_parameter_for_an_old_one_at_its_address() -> None:
    rule = IterationRule()
    first = FakeOptimizer(FakeParameter())
    assert rule.add_update([first], 1) == 0
    address = id(first.param_groups[0]["params"].pop())
    kept = []
    while id(parameter := FakeParameter()) != address:
        kept.append(parameter)
    assert rule.add_update([FakeOptimizer(parameter)], 2) == 0


words = st.lists(st.sampled_from(["b", "A", "B", "C", "AB", "CA"]), max_size=40)


@given(words)
def test_iteration_rule__increases_by_one_after_a_new_backward(
    words: list[str],
) -> None:
    job, last = FakeJob(), -1
    stepped_at: dict[str, int] = {}
    for word in words:
        for number in job.play([word]):
            fresh = any(job.backwards > stepped_at.get(name, 0) for name in word)
            if number is None:
                assert (last, fresh) == (-1, False)
                continue
            assert number == last or (number == last + 1 and fresh)
            last = number
            stepped_at |= dict.fromkeys(word, job.backwards)
    assert job.rule.index == last


@given(words)
def test_iteration_rule__has_one_step_after_a_backward_per_optimizer_and_iteration(
    words: list[str],
) -> None:
    job = FakeJob()
    stepped_at: dict[str, int] = {}
    counted: set[tuple[int | None, str]] = set()
    for word in words:
        for number in job.play([word]):
            fresh = {
                (number, name)
                for name in word
                if job.backwards > stepped_at.get(name, 0)
            }
            assert not fresh & counted
            counted |= fresh
            stepped_at |= dict.fromkeys(word, job.backwards)


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 4)), max_size=12))
def test_iteration_rule__counts_one_per_round_of_backwards(
    rounds: list[tuple[int, int]],
) -> None:
    words = [
        word
        for backwards, steps in rounds
        for word in ["b"] * backwards + ["A"] * steps
    ]
    expected = [
        number for number, (_, steps) in enumerate(rounds) for _ in range(steps)
    ]
    assert ended(words) == expected


@given(st.lists(st.permutations("ABC"), max_size=10), st.booleans())
def test_iteration_rule__does_not_depend_on_the_order_of_optimizers(
    orders: list[list[str]], own_losses: bool
) -> None:
    rounds = [
        "b".join(["", *order]) if own_losses else "b" + "".join(order)
        for order in orders
    ]
    assert ended([*"".join(rounds)]) == [
        number for number in range(len(orders)) for _ in range(3)
    ]


@given(st.lists(st.sampled_from(["b", "b", "A", "A", "B", "AB", "C"]), max_size=40))
def test_iteration_rule__is_the_same_by_its_short_way(words: list[str]) -> None:
    whole, job = FakeJob(), FakeJob()
    for word in words:
        whole.rule._alone = None
        assert whole.play([word]) == job.play([word])
