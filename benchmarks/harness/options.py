"""The options that drivers have in common."""

import argparse


def driver_parser(description: str | None, *, smoke: str = "a tiny model for seconds") -> argparse.ArgumentParser:
    """Return a parser of `--json`, `--smoke` and `--ssd`.

    Args:
        description: Of the driver, as it is.
        smoke: What its short run does.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the bars")
    parser.add_argument("--smoke", action="store_true", help=f"{smoke}: shows that it runs")
    parser.add_argument("--ssd", help="directory on a real disk; default: the current one", default=".")
    return parser
