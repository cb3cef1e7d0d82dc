"""The engine's attention backend that stands on the decode kernel, against the definition of attention."""

from __future__ import annotations

import threading
from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from attention.oracle import Case, check, make_case, padded
from dcp.dealt import run_dealt
from weft.attention.paged_triton import PagedTriton
from weft.dcp.interleave import Interleave
from weft.kv.spec import Latent, PagedKV, Window

DECODE = [(1, 7), (1, 0), (1, 20), (1, 3)]


def moved(x: Any, device: torch.device) -> Any:
    """x with every tensor in it on the device."""
    if isinstance(x, Tensor):
        return x.to(device)
    if isinstance(x, tuple | list):
        return type(x)(moved(y, device) for y in x)
    if is_dataclass(x) and not isinstance(x, type):
        return replace(x, **{f.name: moved(getattr(x, f.name), device) for f in fields(x)})
    return x


def on(device: torch.device, case: Case) -> Case:
    case = moved(case, device)
    case.cache.keys = case.cache.keys.to(device)
    latent = isinstance(case.cache.spec, Latent)
    case.cache.values = case.cache.keys[..., : case.cache.spec.value_width] if latent else case.cache.values.to(device)
    return case


@pytest.mark.parametrize("spec", [PagedKV(1, 8), PagedKV(2, 8), Window(6, 2, 8), Latent(12, 8), Latent(8, 8)], ids=str)
def check_decode(spec: PagedKV | Window | Latent, device: torch.device) -> None:
    case = on(device, make_case(DECODE, seed=1, spec=spec))
    check(PagedTriton(case.cache), case, DECODE)


@pytest.mark.parametrize("spec", [PagedKV(2, 8), Window(6, 2, 8), Latent(12, 8)], ids=str)
def check_padding_rows(spec: PagedKV | Window | Latent, device: torch.device) -> None:
    case = on(device, padded(make_case(DECODE, seed=2, spec=spec), 6))
    check(PagedTriton(case.cache), case, DECODE)


@pytest.mark.parametrize("spec", [PagedKV(2, 8), Window(6, 2, 8), Latent(12, 8), Latent(8, 8)], ids=str)
def check_steps_with_prompts(spec: PagedKV | Window | Latent, device: torch.device) -> None:
    for seed, spans in enumerate(([(1, 12), (6, 2), (1, 0), (9, 0)], [(5, 3)])):
        case = on(device, make_case(spans, seed=seed, spec=spec))
        check(PagedTriton(case.cache), case, spans)


class OneAtATime(PagedTriton):
    """The ranks are threads here, of which Triton's interpreter takes one at a time."""

    turn = threading.Lock()

    def _attend_single(self, *arguments: Any) -> tuple[Tensor, Tensor | None]:
        with self.turn:
            return super()._attend_single(*arguments)

    def _attend_prompts(self, *arguments: Any) -> None:
        with self.turn:
            super()._attend_prompts(*arguments)


@pytest.mark.parametrize("spec", [PagedKV(1, 8), Latent(12, 8)], ids=str)
def check_dealt_tokens(spec: PagedKV | Latent, device: torch.device) -> None:
    """Decode context parallelism: ranks that hold nothing of a row, padding rows, and prompts beside."""
    deal = Interleave(2, 2, 4)
    case = on(device, padded(make_case(DECODE, seed=4, page=deal.span, spec=spec), 6))
    run_dealt(OneAtATime, case, DECODE, deal)
    spans = [(1, 12), (6, 2), (1, 0)]
    run_dealt(OneAtATime, on(device, make_case(spans, seed=3, page=deal.span, spec=spec)), spans, deal)
