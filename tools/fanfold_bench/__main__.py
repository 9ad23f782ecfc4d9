# SPDX-License-Identifier: Apache-2.0
"""Entry of ``python -m fanfold_bench``."""

import sys

from fanfold_bench.cli import main

if __name__ == "__main__":
    sys.exit(main())
