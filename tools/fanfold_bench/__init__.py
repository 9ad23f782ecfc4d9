# SPDX-License-Identifier: Apache-2.0
"""Benchmark of dispatch and combine: Fanfold, its baselines and the machine's floor in one run."""
