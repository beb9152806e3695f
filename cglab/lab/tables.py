"""Result records as tables: the columns that each bench is read by."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cglab.lab.comparison import TAPE_NOTE
from cglab.measure.record import Record

_SIZES = (
    "batch", "context", "tokens", "cached", "concurrency", "bucket", "load", "dataset", "phase", "ops", "kernels",
    "topk", "padding", "running", "waiting", "prompts", "stages", "cap", "rank", "name",
)  # fmt: skip
_COLUMNS = {
    "decode": ("step_ms", "ratio_to_eager", "ratio_to_transformers", "busy_ms", "launches", "kernels", "gap_us",
               "floor_ms", "predicted_gain_ms", "gained_ms", "outcome", "capture_s", "capture_gb", "host_us"),
    "choices": ("step_ms", "ratio_to_compiled", "verdict", "predicted_gain_ms", "gained_ms", "logits_off"),
    "growth": ("step_ms", "ratio_to_eager", "busy_ms", "floor_ms", "kv_bytes", "base_over_least", "row_over_least",
               "kv_over_least", "residual"),
    "prefill": ("step_ms", "ratio_to_eager", "verdict", "busy_ms", "wall_over_busy", "launches", "breaks", "break_us",
                "break_replay_us", "break_host_us", "segment_host_us", "host_ms", "padding_waste", "predicted_gain_ms",
                "gained_ms", "outcome", "buckets", "warmup_s", "capture_s", "capture_gb"),
    "capture": ("buckets", "executables", "warmup_s", "capture_s", "record_s", "instantiate_s", "total_s", "compile_s",
                "kernel_cache", "pool_gb", "executables_gb", "loaded_gb", "held_gb", "seconds_per_bucket",
                "seconds_fixed", "seconds_off", "gb_per_bucket", "saved_gb", "switch_us", "plain_us"),
    "replay": ("bare_us", "host_us", "derive_us", "decide_us", "load_us", "check_us", "dispatch_us", "trim_us",
               "rest_us", "first_decide_us", "launches_outside"),
    "ttft": ("ttft_ms", "queueing_ms", "ratio_to_eager", "verdict", "instances", "gap_share", "predicted_gain_ms",
             "gained_ms", "outcome", "tokens_equal", "occupancy_percent"),
    "ttft_crossover": ("limit", "safe_limit", "next_size", "crossover", "default_limit"),
    "load": ("ttft_ms_p50", "ttft_ratio", "ttft_verdict", "tpot_ms_p50", "tpot_ratio", "output_tok_s",
             "queueing_ms_p50", "tokens_equal", "occupancy_percent", "gauge_percent"),
    "engines": ("ttft_ms_p50", "ttft_ratio", "ttft_verdict", "tpot_ms_p50", "tpot_ratio", "tpot_verdict", "e2e_ms_p50",
                "user_tok_s_p50", "output_tok_s", "errors"),
    "token": ("token_ms", "ratio_to_ours", "verdict", "over_floor", "replay_ms", "host_us", "ready_s", "held_gb",
              "error"),
    "first-token": ("token_ms", "ratio_to_ours", "verdict", "over_floor", "replay_ms", "host_us", "ready_s", "held_gb",
                    "error", "processes"),
    "servers": ("ttft_ms_p50", "tpot_ms_p50", "e2e_ms_p50", "user_tok_s_p50", "total_tok_s_per_device",
                "graph_share_prefill", "graph_share_decode", "graph_memory_gb", "capture_seconds",
                "accept_length", "errors"),
    "accept": ("tokens_per_pass", "accept_rate", "completion_per_pass", "share_1", "share_2", "share_3", "share_4",
               "passes", "tokens_counted", "distinct_4grams", "ok"),
    "speculation": ("steps", "captured", "bitwise", "tokens_equal", "ties", "differing", "tokens_per_pass", "ok"),
    "mtp": ("tokens_s", "tpot_ms", "tpot_ratio", "tpot_verdict", "ttft_ms", "queueing_ms", "round_ms", "round_ratio",
            "accept_length", "seed_step_ms", "draft_loop_ms", "verify_ms", "seed_busy_ms", "gap_ms", "seed_share",
            "tokens_equal"),
    "pipeline": ("tok_s", "gain", "verdict", "forwards_replayed", "forwards_eager", "largest_forward", "exact_lengths",
                 "tokens_equal", "ok"),
    "pipeline_shared": ("forwards_replayed", "forwards_eager", "largest_forward", "breaks", "tokens_equal",
                        "tokens_equal_one_process", "bitwise", "ok"),
    "pp_prefill": ("stage_ms", "busy_ms", "wall_over_busy", "gap_ms", "breaks", "break_ms", "active_devices"),
    "pp_prefill_crossover": ("crossover_cap", "safe_cap", "default_cap", "crossover", "recovery_eager",
                             "recovery_graph"),
    "dflash": ("occupancy_percent", "occupancy_accounting", "occupancy_real", "whole_percent", "step_ms", "round_ratio",
               "round_verdict", "launches", "busy_ms", "block_draft_ms", "verify_ms", "sampler_busy_ms", "gap_ms",
               "accept_length", "tokens_s", "tokens_equal"),
    "scheduler": ("step_us", "plan_us", "inputs_us", "commit_us", "calls", "fixed_us", "each_us", "residual",
                  "exponent", "waiting_ratio", "calls_each", "calls_waiting", "ok"),
    "dsa_prefill": ("ttft_ms", "ttft_ratio", "ttft_verdict", "tpot_ms", "tpot_ratio", "e2e_ms", "e2e_ratio",
                    "step_wall_ms", "step_busy_ms", "gap_ms", "step_launches", "breaks", "bitwise", "tokens_equal",
                    "cache_gb"),
    "dsa_prefill_sweep": ("points", "largest_ttft_ratio", "least_ttft_ratio", "bitwise", "tokens_equal", "graph_gb",
                          "capture_s", "warmup_s"),
    "dsa_ablation": ("ttft_ms", "ttft_ratio", "ttft_verdict", "tpot_ms", "tpot_ratio", "e2e_ms", "e2e_ratio",
                     "accept_length", "tokens_equal", "graph_gb", "draft_graph_gb", "cache_gb"),
    "dsa_ablation_turn": ("tokens_s", "accept_length", "errors", "preemptions"),
    "dsa_choice": ("points", "faster", "slower", "recorded"),
    "dsa_arms": ("requests", "differing", "tokens_equal", "steps", "captured", "ok"),
    "dsa_floor": ("floor", "floor_by_rule", "rows", "differing_buckets"),
    "planner": ("time_ms", "ratio_to_sglang", "waste", "buckets", "eager_steps", "memory_mb", "capture_s", "ok"),
    "recovery": ("operations", "tried", "failed", "ok"),
    "faults": ("operations", "tried", "exhausted", "failed", "memory_growth_bytes", "ok"),
    "soak": ("rounds", "total_steps", "hashes_equal", "memory_growth_bytes", "seconds", "ok"),
    "differential": ("sequences", "total_steps", "captured", "arms", "least_captured", "different", "seconds", "ok"),
    "doctor": ("call_us", "doctor_ms", "overhead", "operation_us", "operations", "findings"),
    "zoo": ("captured", "operations", "breaks", "from_plain_eager", "findings", "foreseen", "refusal"),
    "notebooks": ("tests", "passed", "failures", "errors", "skipped", "ok"),
    "gpu-tests": ("tests", "passed", "failures", "errors", "skipped", "ok"),
    "parity": ("cases", "steps", "captured", "bitwise", "tokens_equal", "ok"),
}  # fmt: skip


def rows(records: Sequence[Record]) -> list[dict[str, Any]]:
    """One flat row a record, with the columns that its bench is read by."""
    return [
        {
            "bench": r.bench, "model": r.model,
            **{name: value for name, value in r.workload.items() if name in _SIZES},
            "arm": r.arm, "parity": (r.parity or {}).get("verdict"),
            **{column: (r.workload | r.metrics).get(column) for column in _COLUMNS.get(r.bench, tuple(r.metrics))},
        }
        for r in records
    ]  # fmt: skip


def format_table(records: Sequence[Record]) -> str:
    """The records as a text table, and the sentence that CPU times need."""
    import pandas

    lines = [pandas.DataFrame(rows(records)).to_string(index=False, float_format=lambda v: f"{v:.4g}")]
    if any(not r.shows_graph_times for r in records):
        lines.append(TAPE_NOTE)
    return "\n".join(lines)
