"""The table of the GPU results."""


def table(result: dict) -> str:
    """Markdown: parity first, then rates, utilisation and memory."""
    about = ", ".join(f"{key} {value}" for key, value in result["machine"].items())
    lines = ["# On a GPU", "", about, "", "## Parity", ""]
    lines += [
        "Largest error against float64, as a share of the tensor's largest entry; that of PyTorch's path in the same"
    ]
    lines += ["dtype beside it.", ""]
    lines += [
        "| case | dtype | path | worst tensor | error | PyTorch's | allowed | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in result["parity"]:
        if "case" not in row:
            reason = f"skipped: {row['skipped']}" if "skipped" in row else f"**{row['error']}**"
            lines.append(f"| {row['name']} | | | | | | | {reason} |")
            continue
        other = f"{row['torch_error']:.1e}" if "torch_error" in row else ""
        outcome = "equal" if row["passed"] else "**different**"
        lines.append(
            f"| {row['case']} | {row['dtype']} | {row['path']} | {row['tensor']} | {row['error']:.1e} | {other} "
            f"| {row['allowed']:.1e} | {outcome} |"
        )
    lines += ["", "## Speed", "", "bfloat16; medians; utilisation against a large bfloat16 matrix product.", ""]
    lines += [
        "| contender | measure | batch x length | tokens/s | utilisation | peak memory GB |",
        "|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        head = f"| {row['contender']} | {row['measure']} | {row['batch']} x {row['length']} "
        if "skipped" in row:
            lines.append(f"{head}| skipped: {row['skipped']} | | |")
            continue
        memory = "" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 1e9:.1f}"
        lines.append(f"{head}| {row['tokens_per_second']:,.0f} | {100 * row['utilisation']:.1f} % | {memory} |")
    return "\n".join(lines) + "\n"
