"""A benchmark's numbers as a table for people."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

Result = dict[str, Any]


def print_results(kind: str, overrides: list[str], results: list[Result]) -> None:
    """Print training measurements side by side, all others as a list of their numbers."""
    if kind in ("train", "packed"):
        _print_training(results)
    elif kind == "processes":
        _print_processes(results)
    else:
        for result in results:
            _print_list(result)


def _print_training(results: list[Result]) -> None:
    table = _table(
        "way", "N", "precision", "tokens/s", "min to max", "of peak", "memory", "over arenas", "components"
    )
    for result in results:
        rate = result["tokens_per_second"]
        mode = ", compiled" if result["compile"] else ""
        table.add_row(
            f"{result['name']}{mode}",
            str(result["num_models"]),
            result["precision"],
            f"{rate['median']:,.0f}",
            f"{rate['min']:,.0f} to {rate['max']:,.0f}",
            f"{result['share_of_matmul_peak']['median']:.0%}",
            f"{result['peak_memory_bytes'] / 2**30:.2f} GiB",
            f"{over / 2**30:.2f} GiB" if (over := result.get("memory_over_arenas_bytes")) is not None else "",
            "  ".join(f"{name} {share:.1%}" for name, share in result.get("components", {}).items()),
        )
    console = _wide_console()
    console.print(table)
    peaks, copies = (
        [result[key] / 1e9 for result in results] for key in ("matmul_peak_flops", "copy_bytes_per_second")
    )
    console.print(
        f"matmul peak {min(peaks):,.0f} to {max(peaks):,.0f} GFLOP/s, copy {min(copies):.1f} to {max(copies):.1f} "
        f"GB/s, {results[-1]['threads']} threads; medians of windows, of peak: as it was around each window"
    )


def _print_processes(results: list[Result]) -> None:
    columns = ("tokens/s", "min to max", "of last", "CPU s", "communicating", "sent", "predicted")
    table = _table("way", "N", "ranks", "precision", *columns)
    for result in results:
        keys = ("tokens_per_second", "of_last", "communication_share", "bytes_sent")
        rate, of_last, share, sent = (result[key] for key in keys)
        predicted = result["predicted_bytes_sent"]
        table.add_row(
            result["name"],
            str(result["num_models"]),
            str(result["ranks"]),
            result["precision"],
            f"{rate['median']:,.0f}",
            f"{rate['min']:,.0f} to {rate['max']:,.0f}",
            "" if of_last is None else f"{of_last['median']:.3f}",
            f"{result['cpu_seconds']['median']:.2f}",
            "" if share is None else f"{share['median']:.1%}",
            f"{sent['median'] / 2**20:.1f} MiB",
            "" if predicted is None else f"{predicted / 2**20:.1f} MiB",
        )
    console = _wide_console()
    console.print(table)
    console.print("of last: against the last way on as many ranks, window by window, median")
    console.print(
        "CPU s: of a rank's threads in an update; communicating: the share of time that training waits for it; "
        "sent: by a rank in an update"
    )


def _table(*columns: str) -> Table:
    """Return an empty table: words to the left, numbers to the right."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="left" if column in ("way", "components") else "right", no_wrap=True)
    return table


def _wide_console() -> Console:
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console.width = 200
    return console


def _print_list(result: Result) -> None:
    print(result["name"])
    for key, value in result.items():
        if isinstance(value, dict):
            shown = "  ".join(f"{name} {number:.4g}" for name, number in value.items())
        else:
            shown = f"{value:.4g}" if isinstance(value, float) else str(value)
        if key != "name":
            print(f"  {key:<26} {shown}")
