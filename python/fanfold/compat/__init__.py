# SPDX-License-Identifier: Apache-2.0
"""Classes with the names and parameters of other projects, each in a module of its project."""
