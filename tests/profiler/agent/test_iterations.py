"""Where iterations end, from the order of backwards and steps alone."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from ebbtide.profiler.agent.iterations import IterationRule


class Optimizer:
    """Stands for an optimizer: the rule asks nothing of it but who it is."""


class Job:
    """Plays a training loop written as words: `b` a backward, any other letters the optimizers of one update."""

    def __init__(self) -> None:
        self.rule = IterationRule()
        self.optimizers: dict[str, Optimizer] = {}
        self.backwards = 0

    def play(self, words: str | Iterable[str]) -> list[int | None]:
        """The iteration that each update ends."""
        ended = []
        for word in words.split() if isinstance(words, str) else words:
            if word == "b":
                self.backwards += 1
            else:
                stepping = [self.optimizers.setdefault(name, Optimizer()) for name in word]
                ended.append(self.rule.stepped(stepping, self.backwards))
        return ended


def ended(words: str | Iterable[str]) -> list[int | None]:
    return Job().play(words)


def test_a_plain_loop_ends_an_iteration_with_each_step() -> None:
    assert ended("b A b A b A") == [0, 1, 2]


def test_gradient_accumulation_makes_no_iterations_of_its_own() -> None:
    assert ended("b b b b A b b b b A") == [0, 1]


def test_the_two_optimizers_of_a_gan_make_one_iteration() -> None:
    assert ended("b D b G b D b G b D b G") == [0, 0, 1, 1, 2, 2]


def test_a_gan_whose_losses_go_backward_together_makes_one_iteration() -> None:
    assert ended("b D G b D G") == [0, 0, 1, 1]


def test_a_discriminator_that_steps_five_times_begins_an_iteration_each_time() -> None:
    assert ended("b D " * 5 + "b G " + "b D " * 5 + "b G") == [0, 1, 2, 3, 4, 4, 5, 6, 7, 8, 9, 9]


def test_an_optimizer_that_steps_now_and_then_joins_the_iteration_it_steps_in() -> None:
    assert ended("b A b A B b A b A B") == [0, 1, 1, 2, 3, 3]


def test_steps_without_a_backward_between_extend_the_iteration() -> None:
    assert ended("b A A A A b A A A A") == [0, 0, 0, 0, 1, 1, 1, 1]
    assert ended("b A AB b AB") == [0, 0, 1]


def test_a_step_before_any_backward_belongs_to_nothing() -> None:
    assert ended("A A b A b A") == [None, None, 0, 1]
    assert ended("AB A b B") == [None, None, 0]


def test_lbfgs_goes_backward_many_times_within_a_step() -> None:
    assert ended("b b b b b L b b b L b L") == [0, 1, 2]


def test_one_optimizer_per_parameter_makes_one_iteration_per_backward() -> None:
    assert ended("b A B C D b A B C D b D C B A") == [0] * 4 + [1] * 4 + [2] * 4


def test_optimizers_that_step_in_one_update_count_as_one() -> None:
    assert ended("b AB b AB b BA") == [0, 1, 2]


def test_an_update_without_optimizers_changes_nothing() -> None:
    job = Job()
    assert job.rule.stepped([], 3) is None
    assert job.play("b A") == [0]
    assert job.rule.stepped([], 9) == 0
    assert job.play("b A") == [1]


def test_an_optimizer_made_anew_goes_on_with_the_iterations() -> None:
    job = Job()
    assert job.play("b A b A") == [0, 1]
    old = weakref.ref(job.optimizers.pop("A"))
    gc.collect()
    assert old() is None  # the rule keeps no optimizer alive
    assert job.play("b B b B b B") == [1, 2, 3]


words = st.lists(st.sampled_from(["b", "A", "B", "C", "AB", "CA"]), max_size=40)


@given(words)
def test_iterations_count_up_by_one_with_an_optimizer_that_has_a_new_backward(words: list[str]) -> None:
    job, last = Job(), -1
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
def test_an_optimizer_steps_after_a_new_backward_once_per_iteration(words: list[str]) -> None:
    job = Job()
    stepped_at: dict[str, int] = {}
    seen: set[tuple[int | None, str]] = set()
    for word in words:
        for number in job.play([word]):
            fresh = {(number, name) for name in word if job.backwards > stepped_at.get(name, 0)}
            assert not fresh & seen
            seen |= fresh
            stepped_at |= dict.fromkeys(word, job.backwards)


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 4)), max_size=12))
def test_one_optimizer_ends_one_iteration_per_round_of_backwards(rounds: list[tuple[int, int]]) -> None:
    words = [word for backwards, steps in rounds for word in ["b"] * backwards + ["A"] * steps]
    expected = [number for number, (_, steps) in enumerate(rounds) for _ in range(steps)]
    assert ended(words) == expected


@given(st.lists(st.permutations("ABC"), max_size=10), st.booleans())
def test_the_order_in_which_optimizers_step_does_not_matter(orders: list[list[str]], own_losses: bool) -> None:
    rounds = ["b".join(["", *order]) if own_losses else "b" + "".join(order) for order in orders]
    assert ended([*"".join(rounds)]) == [number for number in range(len(orders)) for _ in range(3)]
