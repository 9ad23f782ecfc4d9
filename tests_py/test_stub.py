# SPDX-License-Identifier: Apache-2.0
"""The committed stub describes the extension that is installed."""

import gen_stub


def test_the_committed_stub_is_what_the_extension_generates():
    assert gen_stub.difference() == "", "run tools/gen_stub.py and commit the result"
