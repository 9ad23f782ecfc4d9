# SPDX-License-Identifier: Apache-2.0
"""A small byte-level Mixture-of-Experts language model for the demo, the bench and the tests."""
