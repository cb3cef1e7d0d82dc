"""Faults to be planted by `run.py`: each is a small, likely mistake, and some test must see it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """A mistake, and the tests that must see it.

    Attributes:
        name: says what is wrong with it.
        file: below src/weft; a file of weft-bench begins with weft_bench/.
        old: occurs once in the file, and is replaced by `new`.
        tests: arguments of pytest; at least one of the tests must fail.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    @property
    def path(self) -> str:
        """The file in a folder that holds both packages."""
        return self.file if self.file.startswith("weft_bench/") else f"weft/{self.file}"


EXHAUSTIVE, EXPERTS = "tests/planner/test_exhaustive.py", "tests/planner/test_experts.py"
HIDDEN, KNOWN = "tests/models/test_hidden.py", "tests/test_known_failures.py"
TRANSFORMERS = "tests/models/test_as_transformers.py"
LOGITS = "tests/models/test_logits.py::test_every_layout_gives_transformers_logits"
ONE = "attn_dp=1 attn_tp=1 ep=1 moe_tp=1"
MESSAGES, REUSE = "tests/engine/test_agent_messages.py", "tests/engine/test_reuse.py"
FIELDS, CHUNKS = "tests/server/test_fields.py", "tests/server/test_tools.py::test_calls_in_later_chunks_are_numbered_on"

ONCE_MISSED = [
    Fault(
        "a gate that owes a sum scales",
        "stream/hidden.py",
        '        factor.require_complete(f"a factor of {self.origin}")\n',
        "",
        (f"{HIDDEN}::test_a_factor_that_is_not_complete_is_refused",),
    ),
    Fault(
        "a gate of other rows scales",
        "stream/hidden.py",
        "if factor.placement.rows != self.placement.rows:",
        "if False:",
        (f"{HIDDEN}::test_a_factor_of_other_rows_is_refused",),
    ),
    Fault(
        "what is scaled owes nothing",
        "stream/hidden.py",
        'mul_(factor._elements("a product"))\n        return self',
        'mul_(factor._elements("a product"))\n        return replace(self, placement=factor.placement)',
        (f"{HIDDEN}::test_a_scaled_value_owes_what_it_owed",),
    ),
    Fault(
        "values of other placements are added in place",
        "stream/hidden.py",
        "        self.require_same(other)\n        self.value.add_(other.value)",
        "        self.value.add_(other.value)",
        (f"{HIDDEN}::test_values_that_owe_otherwise_are_not_added",),
    ),
    Fault(
        "split features pass for complete",
        "stream/hidden.py",
        "if self.placement.owes or self.placement.split:",
        "if self.placement.owes:",
        (f"{HIDDEN}::test_whole_rows_are_required",),
    ),
    Fault(
        "calls in later chunks are numbered from 0",
        "serve/dialects/completions.py",
        'calls.append({"index": part.number} | part.call.plain())',
        'calls.append({"index": len(calls)} | part.call.plain())',
        (CHUNKS,),
    ),
    Fault(
        "all_reduce goes by a plan that was forgotten",
        "comm/shm.py",
        "                self._all_reduces.clear()\n",
        "",
        ("tests/comm/test_new_exchange.py::test_plans_are_forgotten",),
    ),
    Fault(
        "static FP8 is taken",
        "engine/models/weights/float8_weights.py",
        'method.only("activation_scheme", "dynamic")',
        'method.only("activation_scheme", "dynamic", "static")',
        ("tests/models/test_load.py::test_directories_that_cannot_be_served",),
    ),
    Fault(
        "of two stop strings in one token the later wins",
        "engine/output/detokenizer.py",
        "at, stop = min(found)",
        "at, stop = max(found)",
        ("tests/engine/test_increments.py",),
    ),
    Fault(
        "an echoed prompt has more alternatives than asked for",
        "serve/dialects/completions.py",
        "for t, value in p.top[:limit]} for p in scores]",
        "for t, value in p.top} for p in scores]",
        (f"{FIELDS}::test_each_table_has_as_many_alternatives_as_were_asked_for",),
    ),
    Fault(
        "a prompt has more alternatives than asked for",
        "serve/dialects/completions.py",
        "[(p.token_id, p.logprob), *p.top[:limit]]",
        "[(p.token_id, p.logprob), *p.top]",
        (f"{FIELDS}::test_each_table_has_as_many_alternatives_as_were_asked_for",),
    ),
    Fault(
        "a token has the most alternatives that any asked for",
        "engine/worker/step_output.py",
        "tuple(zip(best[:n], values[:n], strict=True))",
        "tuple(zip(best, values, strict=True))",
        ("tests/engine/test_sampler.py::test_logprobs_are_of_the_raw_logits_for_those_who_ask",),
    ),
    Fault(
        "bad words may come after a space",
        "serve/chat/protocol.py",
        'for space in ("", " ")]',
        'for space in ("",)]',
        (f"{FIELDS}::test_bad_words_are_banned_at_the_start_of_a_text_and_after_a_space",),
    ),
    Fault(
        "bytes are reported of one walk",
        "stream/stats.py",
        "walks * planner.received(op, counts)",
        "planner.received(op, counts)",
        ("tests/engine/test_times.py",),
    ),
    Fault(
        "dispatch's chance goes by ranks",
        "planner/experts.py",
        "return Dispatch(experts, k, mesh.ep, mesh.attn_tp, row_bytes)",
        "return Dispatch(experts, k, mesh.world, mesh.attn_tp, row_bytes)",
        (f"{EXPERTS}::test_the_chance_that_a_row_goes_to_a_rank_counts_every_choice_of_experts",),
    ),
    Fault(
        "forms that leave other deltas are taken for one",
        "planner/plan.py",
        "(read.target, read.inside, read.wire, read.plain, after)",
        "(read.target, read.inside, read.wire, read.plain)",
        (f"{EXHAUSTIVE}::test_no_choice_of_forms_is_cheaper",),
    ),
    Fault(
        "counts of equal sum are not filled",
        "stream/step_rows.py",
        "if counts == self._counts:",
        "if self._counts is not None and sum(counts) == sum(self._counts):",
        ("tests/gpu/test_padded.py::test_other_counts_with_the_same_sum_are_filled",),
    ),
    Fault(
        "a norm about one is rounded first",
        "kernels/torch_reference.py",
        "else (weight * normed).to(x.dtype)",
        "else (weight * normed.to(x.dtype)).to(x.dtype)",
        (f"{HIDDEN}::test_a_norm_about_one_is_rounded_once",),
    ),
    Fault(
        "gathered tokens have no place for the ends of pages",
        "engine/attention/captured_prompts.py",
        "capacity = limit * ranks + PAGE * min(sequences, len(rows) // 2)",
        "capacity = limit * ranks",
        ("tests/gpu/triton_checks/test_backend.py::test_prompts_in_graphs_gather_all_tokens_that_the_plan_allows",),
    ),
    Fault(
        "a rank's message of an earlier start is taken for this one's",
        "engine/hosts/agents.py",
        "return message.encoded if message.number == self._number else None",
        "return message.encoded",
        (f"{MESSAGES}::test_messages_of_an_earlier_start_are_not_taken_for_this_ones",),
    ),
    Fault(
        "a rank that ended before this start has ended in it",
        "engine/hosts/agents.py",
        "if isinstance(message, Ended) and message.number == self._number:",
        "if isinstance(message, Ended):",
        (f"{MESSAGES}::test_messages_of_an_earlier_start_are_not_taken_for_this_ones",),
    ),
    Fault(
        "ranks of any start count as stopped",
        "engine/hosts/agents.py",
        "            agent.stopped = message.number\n",
        "            agent.stopped = self._number\n",
        (f"{MESSAGES}::test_messages_of_an_earlier_start_are_not_taken_for_this_ones",),
    ),
    Fault(
        "ends of ranks are kept for the next start",
        "engine/hosts/agents.py",
        "self._number, self._ended = number, []",
        "self._number = number",
        (f"{MESSAGES}::test_messages_of_an_earlier_start_are_not_taken_for_this_ones",),
    ),
    Fault(
        "a host that waits is forgotten where the first is lost",
        "engine/hosts/agents.py",
        "            self._admit(candidate.identity, candidate.join)\n",
        "            pass\n",
        (f"{MESSAGES}::test_a_host_that_waits_takes_the_place_of_one_that_is_lost",),
    ),
    Fault(
        "a host that leaves keeps its successor out",
        "engine/hosts/agents.py",
        "        if isinstance(message, Left):\n            self._drop(agent, message.text)\n            return None\n",
        "",
        (f"{MESSAGES}::test_a_host_that_waits_takes_the_place_of_one_that_is_lost",),
    ),
    Fault(
        "a host that was lost once is lost for good",
        "engine/hosts/agents.py",
        "                self._drop_silent()\n        self._lost = None\n",
        "                self._drop_silent()\n",
        (f"{MESSAGES}::test_a_host_that_waits_takes_the_place_of_one_that_is_lost",),
    ),
    Fault(
        "a rank that ended by itself was killed",
        "engine/hosts/agents.py",
        "if e.killed or not killed), None)",
        "if e.text), None)",
        (f"{MESSAGES}::test_messages_of_an_earlier_start_are_not_taken_for_this_ones",),
    ),
    Fault(
        "ranks get messages of an earlier start",
        "engine/hosts/agent.py",
        "self._ranks.running and message.number == self._number:",
        "self._ranks.running:",
        (f"{MESSAGES}::test_an_agent_hands_on_messages_of_its_start_alone",),
    ),
    Fault(
        "the middle of weights is not sampled",
        "engine/hosts/digests.py",
        "sorted({0, max(0, size // 2 - BLOCK // 2), max(0, size - BLOCK)})",
        "sorted({0, max(0, size - BLOCK)})",
        ("tests/engine/test_agents.py::test_digests_see_a_header_and_sampled_weights",),
    ),
    Fault(
        "rows that two formats are asked for travel in one alone",
        "stream/stream.py",
        "given.plain or len(given.made) != 1}",
        "given.plain or not given.made}",
        ("tests/models/test_formats.py::test_rows_that_a_block_takes_in_two_formats_are_gathered_as_they_are",),
    ),
    Fault(
        "a state is kept at the end of a prompt of whole pages",
        "engine/kv/manager.py",
        "return (tokens - 1) // self.page_size * self.page_size",
        "return tokens // self.page_size * self.page_size",
        (f"{REUSE}::test_a_state_is_kept_a_page_before_the_end_of_a_prompt_of_whole_pages",),
    ),
    Fault(
        "a mixed exchange's result may have any size",
        "library/communicator.py",
        "        self._takes.check_result(op, x, sum(sizes))\n        return self.transport.all_reduce_all_gatherv",
        "        return self.transport.all_reduce_all_gatherv",
        ("tests/library/test_communicator.py::test_calls_that_differ_between_ranks",),
    ),
    Fault(
        "a rank's connection stays in epoll",
        "engine/messages/rank_sockets.py",
        "            self._poll.unregister(connection.socket)",
        "            pass",
        ("tests/engine/test_rank_sockets.py::test_a_rank_ends_though_a_forked_process_holds_its_connection",),
    ),
]
"""Faults that no test saw once."""

OWN = [
    # planner
    Fault(
        "a placement of one group forgets the debt over it",
        "planner/spec.py",
        '        if owes != "world":\n            return False, None\n',
        '        if owes != "world":\n            return True, None\n',
        (f"{EXHAUSTIVE}::test_the_legal_steps_are_those_of_the_algebra",),
    ),
    Fault(
        "rows beyond an even share go to the last ranks",
        "planner/spec.py",
        "self.attn_tp - 1 - rank % self.attn_tp) // self.attn_tp",
        "rank % self.attn_tp) // self.attn_tp",
        ("tests/planner/test_planner.py::test_rows_of_the_ranks_tile_the_world",),
    ),
    Fault(
        "a rank receives its own term",
        "planner/exchange.py",
        "return (terms - 1) * share + ",
        "return terms * share + ",
        ("tests/planner/test_exchange.py", "tests/planner/test_planner.py"),
    ),
    Fault(
        "a sum of two halves is looked for in one order of sets alone",
        "planner/search.py",
        "if part <= rest:",
        "if part < rest:",
        (f"{EXHAUSTIVE}::test_no_plan_is_cheaper", f"{EXHAUSTIVE}::test_four_deltas_as_cheap_as_can_be"),
    ),
    Fault(
        "a full bucket is rounded up to the next",
        "planner/chain.py",
        "(1 << max(largest - 1, 0).bit_length(),)",
        "(1 << largest.bit_length(),)",
        ("tests/planner/test_planner.py", EXPERTS),
    ),
    Fault(
        "a dispatch has room for one rank's rows",
        "planner/experts.py",
        "-(-tokens // self.shared) * ranks * self.sent_row_bytes",
        "-(-tokens // self.shared) * self.sent_row_bytes",
        (f"{EXPERTS}::test_a_rank_has_the_capacity_for_every_row_with_its_list",),
    ),
    Fault(
        "what experts' rows are to expect goes by the fullest group",
        "planner/experts.py",
        "min(counts)) / others",
        "max(counts)) / others",
        (f"{EXPERTS}::test_bytes_are_those_of_the_rows_that_others_send",),
    ),
    Fault(
        "captured steps dispatch by any transport",
        "planner/prices.py",
        "counting = offer.live_sizes or not (recipe.live and self._captured)",
        "counting = True",
        (f"{EXPERTS}::test_captured_steps_dispatch_by_transports_that_take_counts_on_the_device",),
    ),
    Fault(
        "merged prompts gather no queries",
        "planner/recipes.py",
        "self.query_bytes, relaid=True), rows),) if self.query_bytes else ()",
        "self.query_bytes, relaid=True), rows),) if not self.query_bytes else ()",
        ("tests/planner/test_dcp.py::test_prompts_take_the_form_that_moves_less",),
    ),
    Fault(
        "a block dispatches what the plan has not",
        "stream/block_exchanges.py",
        "if op.value == what]",
        "if type(op.value) is type(what)]",
        ("tests/engine/test_one_plan.py::test_a_block_that_dispatches_otherwise_than_it_was_traced_is_found",),
    ),
    Fault(
        "a dispatch goes by one recipe",
        "stream/block_exchanges.py",
        "DISPATCHES[found[0].recipe.name]",
        'DISPATCHES["all_to_allv"]',
        ("tests/engine/test_one_plan.py::test_a_recipe_of_a_dispatch_is_added_by_one_registration",),
    ),
    Fault(
        "exchanges of a dispatch are not timed",
        "stream/block_exchanges.py",
        "with nullcontext() if self._times is None else self._times.timed(self._counts, self.site, op):",
        "with nullcontext():",
        ("tests/dcp/test_moves.py::test_of_dispatched_experts",),
    ),
    Fault(
        "ranks do not hear how prompts attend",
        "engine/worker/model_runner.py",
        "{Merge: dcp_exchange, Prompt: dcp_prefill}",
        "{Merge: dcp_exchange}",
        ("tests/dcp/test_engine.py::test_greedy_tokens_are_transformers",),
    ),
    Fault(
        "what a dispatch takes is left out of a read's time",
        "planner/plan.py",
        "                        more_us += inside_us\n",
        "",
        (f"{EXPERTS}::test_the_cheapest_of_every_choice_of_forms",),
    ),
    Fault(
        "beyond the largest size times stay",
        "planner/cost.py",
        "return before * bytes_moved / low",
        "return before",
        ("tests/planner/test_cost.py",),
    ),
    Fault(
        "a merge in several calls is priced as one",
        "planner/prices.py",
        "us += times * self.calls_us(",
        "us += self.calls_us(",
        ("tests/planner/test_recipes.py",),
    ),
    # the stream
    Fault(
        "what is added after the last read is lost",
        "stream/stream.py",
        'delta was added after the last read: it would be lost."""\n        if self._deltas.values:',
        'delta was added after the last read: it would be lost."""\n        if False:',
        (f"{KNOWN}::test_the_last_layer_is_never_settled",),
    ),
    Fault(
        "padding is added to a stream",
        "stream/stream.py",
        "if delta.value.shape[0] != have:",
        "if delta.value.shape[0] < have:",
        (f"{KNOWN}::test_padding_rows_are_not_tokens",),
    ),
    Fault(
        "a merged delta takes the place of the other",
        "stream/stream.py",
        "self.deltas[op.into] = self.deltas[op.into] + delta",
        "self.deltas[op.into] = delta",
        ("tests/planner/test_planner.py::test_plans_compute_what_the_naive_plan_computes",),
    ),
    Fault(
        "times of one step stand for another's",
        "stream/stats.py",
        "for (_, k), total in self._totals.items() if k == key]",
        "for _, total in self._totals.items()]",
        ("tests/engine/test_times.py",),
    ),
    # comm
    Fault(
        "ranks that share an expert get other ranks' rows",
        "stream/dispatch.py",
        "goes.repeat_interleave(mesh.moe_tp, dim=1)",
        "goes.repeat(1, mesh.moe_tp)",
        ("tests/comm/test_dispatch.py::test_every_row_gets_the_sum_of_its_experts",),
    ),
    Fault(
        "experts' parts are added in the rows' dtype",
        "stream/dispatch.py",
        "dtype=torch.promote_types(x.dtype, torch.float32))",
        "dtype=x.dtype)",
        ("tests/comm/test_dispatch.py::test_parts_are_added_in_float32",),
    ),
    Fault(
        "live counts of ranks are the groups'",
        "stream/step_rows.py",
        "own = edge.segments(self.mesh, self.rank), edge.segment_rows == Rows.OWN\n",
        "own = edge.segments(self.mesh, self.rank), False\n",
        (
            "tests/gpu/test_padded.py::test_other_counts_with_the_same_sum_are_filled",
            "tests/gpu/test_padded.py::test_emulated",
        ),
    ),
    Fault(
        "equal values are summed on the reference",
        "comm/reference.py",
        "if self.audit and len(tensors) > 1",
        "if self.audit and len(tensors) > 2",
        ("tests/comm/test_reference.py::test_replicated_values_are_not_summed",),
    ),
    Fault(
        "a permute's rows to itself may differ",
        "comm/transport.py",
        "if len(receive) != n or send[place] != receive[place]:",
        "if len(receive) != n:",
        ("tests/comm/test_reference.py::test_rows_that_a_rank_sends_itself_are_those_that_it_receives",),
    ),
    # dcp
    Fault(
        "an empty part with +∞ counts",
        "kernels/torch_reference.py",
        "lses.nan_to_num(nan=-inf, posinf=-inf, neginf=-inf)",
        "lses.nan_to_num(nan=-inf, posinf=inf, neginf=-inf)",
        ("tests/dcp/test_merge.py::test_each_part_empty_in_turn_and_all",),
    ),
    Fault(
        "the last run of tokens is counted whole",
        "stream/interleave.py",
        "return rounds * self.chunk + _clip(rest, self.chunk)",
        "return rounds * self.chunk + _clip(rest, 1) * self.chunk",
        ("tests/dcp/test_interleave.py",),
    ),
    Fault(
        "gathered heads lie rank by rank within a row the other way",
        "stream/group.py",
        "gathered.view(ranks, rows, heads, dim).transpose(0, 1).reshape(rows, ranks * heads, dim)",
        "gathered.view(ranks, rows, heads, dim).permute(1, 2, 0, 3).reshape(rows, ranks * heads, dim)",
        ("tests/dcp/test_attention.py",),
    ),
    Fault(
        "parts of a merge in several calls are live as the whole",
        "stream/block_exchanges.py",
        "(live - begin).clamp(0, plan.max_call_rows)",
        "live.clamp(0, plan.max_call_rows)",
        ("tests/dcp/test_merge.py::test_each_of_several_calls_has_its_own_live_tokens",),
    ),
    # kv
    Fault(
        "a page of which a part is reused is not copied",
        "engine/kv/manager.py",
        "            if match.more:  # its",
        "            if False:  # its",
        ("tests/engine/test_reuse.py",),
    ),
    Fault(
        "the whole prompt is reused, and no row is left to run",
        "engine/kv/manager.py",
        "known = tokens[: len(tokens) - 1]\n",
        "known = tokens\n",
        ("tests/engine/test_reuse.py", "tests/engine/test_scheduler.py"),
    ),
    Fault(
        "a window gives its pages back a token early",
        "engine/kv/manager.py",
        "passed = max(0, computed - window + 1) // self.page_size",
        "passed = max(0, computed - window + 2) // self.page_size",
        ("tests/engine/test_reuse.py::test_a_window_keeps_what_later_rows_see_and_no_page_more",),
    ),
    Fault(
        "a shared page is evicted",
        "engine/kv/prefix.py",
        "pool.holders(held[remaining - 1]) == 1:",
        "pool.holders(held[remaining - 1]) <= 2:",
        ("tests/engine/test_reuse.py", "tests/engine/test_scheduler.py"),
    ),
    Fault(
        "what was used last is evicted as if never used",
        "engine/kv/prefix.py",
        "            run.used = now\n",
        "            pass\n",
        ("tests/engine/test_reuse.py",),
    ),
    # engine
    Fault(
        "penalties count the prompt",
        "engine/scheduler/sampling_rows.py",
        "Counter(tokens[sequence.prompt_tokens :])",
        "Counter(tokens)",
        ("tests/engine/test_sampler.py::test_what_a_sequence_needs_for_its_next_token",),
    ),
    Fault(
        "min_tokens does not count tokens that are being drawn",
        "engine/scheduler/sampling_rows.py",
        "sequence.output_tokens + sequence.pending + len(drafts)",
        "sequence.output_tokens + len(drafts)",
        ("tests/engine/test_sampler.py",),
    ),
    Fault(
        "top_p leaves out the token that reaches it",
        "engine/worker/sampler.py",
        "before = probability.cumsum(-1) - probability",
        "before = probability.cumsum(-1)",
        ("tests/engine/test_sampler.py::test_top_p_keeps_the_fewest_that_reach_it",),
    ),
    Fault(
        "min_p is of the logits before temperature",
        "engine/worker/sampler.py",
        "threshold = scaled.amax(-1, keepdim=True) + min_p.log()",
        "threshold = logits.amax(-1, keepdim=True) + min_p.log()",
        ("tests/engine/test_sampler.py::test_min_p_drops_what_is_far_from_the_best",),
    ),
    Fault(
        "a client's turn does not pass to the next",
        "engine/scheduler/waiting_queue.py",
        "            level.clients.move_to_end(sequence.sharing.client)\n",
        "            pass\n",
        ("tests/engine/test_load.py::test_clients_alternate_and_preempted_requests_come_first",),
    ),
    Fault(
        "the oldest gives way",
        "engine/scheduler/scheduler.py",
        "victim = next(s for s in reversed(self.running) if s is sequence or s not in planned)",
        "victim = next(s for s in self.running if s is sequence or s not in planned)",
        ("tests/engine/test_scheduler.py",),
    ),
    Fault(
        "stop tokens end an answer a token too early",
        "engine/output/request_output.py",
        "if token in s.end_ids and at + 1 >= s.params.min_tokens:",
        "if token in s.end_ids and at + 2 >= s.params.min_tokens:",
        ("tests/engine/test_increments.py::test_an_end_counts_from_min_tokens_on",),
    ),
    Fault(
        "a seed keeps its lowest bits alone",
        "engine/output/request_output.py",
        "params.seed & (2**62 - 1)",
        "params.seed & (2**16 - 1)",
        ("tests/engine/test_increments.py::test_all_bits_of_a_requests_seed_are_kept",),
    ),
    Fault(
        "what a mask allows is not cut to the allowed tokens",
        "engine/grammar/grammar.py",
        'both = int.from_bytes(mask, "little") & int.from_bytes(allowed, "little")',
        'both = int.from_bytes(mask[: len(allowed)], "little")',
        ("tests/engine/test_grammar.py",),
    ),
    Fault(
        "old failures count for ever",
        "engine/controller/fault_window.py",
        "while self._failures[0][0] < now - self._window_s:",
        "while self._failures[0][0] < now - 1e9:",
        ("tests/engine/test_restart.py",),
    ),
    Fault(
        "a rank that ran another plan is not found",
        "engine/controller/executor.py",
        "due = Ran(number, counts, results[0].ran.plan, sampled)",
        "due = Ran(number, counts, result.ran.plan, sampled)",
        ("tests/engine/test_faults.py::test_ranks_that_do_not_execute_the_same_are_found_in_that_step",),
    ),
    Fault(
        "of equally good tokens of two ranks the last counts",
        "engine/worker/split_vocabulary.py",
        "rank = gathered[..., 0].argmax(0, keepdim=True)",
        "rank = len(gathered) - 1 - gathered[..., 0].flip(0).argmax(0, keepdim=True)",
        ("tests/engine/test_vocabulary.py",),
    ),
    # models and attention
    Fault(
        "a router's bias weighs, too",
        "engine/kernels/model_reference.py",
        "weight = scores.gather(-1, expert)",
        "weight = ranked.gather(-1, expert)",
        ("tests/models/test_routing.py",),
    ),
    Fault(
        "experts beyond the chosen groups are taken",
        "engine/models/layers/routing.py",
        "if not 1 <= self.k <= self.top_groups * size:",
        "if not 1 <= self.k <= experts:",
        (TRANSFORMERS,),
    ),
    Fault(
        "a head of its own is not loaded",
        "engine/models/load.py",
        "if isinstance(head, Head) and head.tied and",
        "if isinstance(head, Head) and not head.tied and",
        (f"{TRANSFORMERS}::test_a_head_of_its_own_beside_tied_embeddings",),
    ),
    Fault(
        "a bias is added on every rank",
        "engine/models/layers/basic.py",
        "if bias and share.start == 0:",
        "if bias:",
        (f"{HIDDEN}::test_what_layers_leave",),
    ),
    Fault(
        "key-value heads that are replicated lie in another order",
        "planner/shards.py",
        "unit = -(-(place + 1) * units // ranks) - 1",
        "unit = place % units",
        (f"{LOGITS}[qwen3_moe-attn_dp=1 attn_tp=4 ep=4 moe_tp=1]",),
    ),
    Fault(
        "experts are numbered from the world's first",
        "engine/kernels/model_reference.py",
        "return weight, expert - mine.start",
        "return weight, expert",
        (f"{LOGITS}[qwen3_moe-attn_dp=1 attn_tp=2 ep=2 moe_tp=1]",),
    ),
    Fault(
        "a shared expert has no gate",
        "engine/models/layers/moe.py",
        "partial(self.shared, x, self.shared_gate)",
        "partial(self.shared, x, None)",
        (f"{LOGITS}[qwen2_moe-{ONE}]",),
    ),
    Fault(
        "up of fused experts is read from gate's rows",
        "engine/models/weights/expert_sources.py",
        "below = slice(inner + cut.start, inner + cut.stop) if fused else cut",
        "below = cut",
        (f"tests/models/test_qwen35.py::test_logits_are_transformers[{ONE}]",),
    ),
    Fault(
        "scales of a slice in FP8 begin with the tensor's",
        "engine/models/weights/float8_weights.py",
        "at // block - take[dim].start // block",
        "(at - take[dim].start) // block",
        ("tests/models/test_checkpoint.py",),
    ),
    Fault(
        "YaRN stretches scores once, not squared",
        "engine/models/config_json/common_fields.py",
        "(0.1 * all_dim * math.log(factor) + 1.0) ** 2",
        "(0.1 * all_dim * math.log(factor) + 1.0)",
        ("tests/models/test_routing.py::test_interleaved_rotary_is_transformers",),
    ),
    Fault(
        "a sink takes from other rows",
        "engine/kernels/model_reference.py",
        "(lse - sinks).sigmoid()",
        "(sinks - lse).sigmoid()",
        (f"tests/models/test_gpt_oss.py::test_logits_are_transformers[{ONE}]",),
    ),
    Fault(
        "a window sees a token more",
        "engine/attention/sdpa.py",
        "seen & (position > row - window)",
        "seen & (position >= row - window)",
        ("tests/attention/test_sdpa.py",),
    ),
    Fault(
        "a decode row on a CPU sees a token before its window",
        "kernels/csrc/model/model.cc",
        "begin = window ? std::max<int64_t>(0, end - window) : 0",
        "begin = window ? std::max<int64_t>(0, end - window - 1) : 0",
        ("tests/engine/test_cpu_kernels.py", "-k", "over_pages", "-m", "not nightly"),
    ),
    Fault(
        "gate and up of limited experts share a bound",
        "engine/kernels/model_reference.py",
        "value = F.silu(gate).clamp(max=limit) * up.clamp(-limit, limit)",
        "value = F.silu(gate).clamp(max=limit) * up.clamp(max=limit)",
        (f"tests/models/test_step.py::test_logits_are_transformers[{ONE}]",),
    ),
    Fault(
        "quantised rows go by the first group's largest value",
        "kernels/float8.py",
        "largest = blocks.abs().amax(-1).clamp(min=MIN_MAGNITUDE)",
        "largest = blocks.amax(-1).clamp(min=MIN_MAGNITUDE)",
        ("tests/models/test_float8.py::test_logits_are_off_as_by_noise_of_the_size_of_the_rounding",),
    ),
    # drafts
    Fault(
        "a draft has the position of the row's last token",
        "engine/worker/row_table.py",
        "SeqRows(1, table[row].length + at, table[row].tables, 1)",
        "SeqRows(1, table[row].length, table[row].tables, 1)",
        ("tests/speculation/test_rank_drafts.py",),
    ),
    Fault(
        "a draft of a recorded step has the position of the row's last token",
        "engine/worker/graph_inputs.py",
        "tokens.places.extend(range(len(drafts) + 1))",
        "tokens.places.extend([0] * (len(drafts) + 1))",
        ("tests/speculation/test_rank_drafts.py",),
    ),
    Fault(
        "further passes of drafts begin behind a stale key",
        "engine/worker/draft_chain.py",
        "table.rows[row].length + ahead, table.capacity(row)",
        "table.rows[row].length + ahead + 1, table.capacity(row)",
        ("tests/speculation/test_draft_models.py::test_drafts_are_those_of_the_definition",),
    ),
    Fault(
        "further passes of recorded drafts begin behind a stale key",
        "engine/worker/recorded_drafts.py",
        "[table.rows[row].length for row in rows]",
        "[table.rows[row].length + 1 for row in rows]",
        ("tests/speculation/test_draft_models.py::test_drafts_are_those_of_the_definition",),
    ),
    Fault(
        "ranks hold the drafts of an earlier step",
        "engine/worker/held_drafts.py",
        "self._of_rows = dict(zip(rows.sampling_rows, each, strict=False))",
        "self._of_rows = self._of_rows or dict(zip(rows.sampling_rows, each, strict=False))",
        ("tests/speculation/test_draft_layers.py::test_a_rank_holds_drafts_for_its_next_step",),
    ),
    Fault(
        "keys of rejected drafts stay before a row's length",
        "engine/worker/row_table.py",
        "            self.rows[row].length -= len(drafts) - accepted\n",
        "",
        ("tests/speculation/test_rank_drafts.py",),
    ),
    Fault(
        "a grammar's mask is of the position before",
        "engine/grammar/grammar.py",
        "            self._matcher.consume_token(draft)\n            masks.append(self.mask(allowed))\n",
        "            masks.append(self.mask(allowed))\n            self._matcher.consume_token(draft)\n",
        ("tests/speculation/test_outputs.py::test_every_parameter",),
    ),
    Fault(
        "a draft is accepted without the token that is sampled",
        "engine/worker/row_table.py",
        "if draft != own[at]), len(drafts))",
        "if False), len(drafts))",
        ("tests/speculation/test_rank_drafts.py",),
    ),
    # server, bench, evals
    Fault(
        "a key is right that begins so",
        "serve/http/guard.py",
        "secrets.compare_digest(key_given.strip().encode(), key.encode())",
        "key_given.strip().startswith(key)",
        ("tests/server/test_http.py::test_the_key_is_asked_for",),
    ),
    Fault(
        "a body without a length may be as large as it likes",
        "serve/http/guard.py",
        "            if left < 0:\n",
        "            if False:\n",
        ("tests/server/test_connections.py",),
    ),
    Fault(
        "cached tokens count for each choice",
        "serve/chat/parsed_output.py",
        "cached = [min((last",
        "cached = [max((last",
        ("tests/server/test_limits.py",),
    ),
    Fault(
        "an unfinished tag is sent as text",
        "serve/chat/tools.py",
        "cut_tag = len(self._held) > 1 and self._form.begin.startswith(self._held)",
        "cut_tag = False",
        ("tests/server/test_tools.py::test_calls_however_they_are_cut",),
    ),
    Fault(
        "half a character at the end is lost",
        "engine/output/detokenizer.py",
        "return self._release(len(self._held)) + self._undecoded()",
        "return self._release(len(self._held))",
        ("tests/engine/test_increments.py",),
    ),
    Fault(
        "time for each token counts the first",
        "weft_bench/serving.py",
        "(last - first) / (self.output_tokens - 1)",
        "(last - first) / self.output_tokens",
        ("tests/bench/test_serving.py",),
    ),
    Fault(
        "an answer in digits need not agree with its words",
        "weft_bench/word_problems.py",
        "return value if str(value) == digits and number_words(value) == words else None",
        "return value if str(value) == digits else None",
        ("tests/bench/test_word_problems.py::test_an_answer_counts_only_where_digits_and_words_agree",),
    ),
    Fault(
        "shares overlap by one head",
        "planner/shards.py",
        "return range(-(-place * units // ranks), -(-(place + 1) * units // ranks))",
        "return range(-(-place * units // ranks), min(units, -(-(place + 1) * units // ranks) + units % ranks))",
        ("tests/models/test_any_ranks.py", "-m", "not nightly"),
    ),
    Fault(
        "query heads of a shared key-value head overlap by one",
        "planner/shards.py",
        "held.start * each + part.stop)",
        "held.start * each + min(each, part.stop + each % (behind - first)))",
        ("tests/planner/test_shards.py",),
    ),
    Fault(
        "the last features of uneven shares are on no rank",
        "engine/models/layers/basic.py",
        "units = -(-size // unit)\n",
        "units = size // unit\n",
        ("tests/models/test_any_ranks.py", "-m", "not nightly"),
    ),
]
"""Drawn over the whole tree."""

FAULTS = [*ONCE_MISSED, *OWN]
