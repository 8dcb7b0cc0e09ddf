"""Draft, verify, accept, commit: self-speculative decoding as one `lax.while_loop` over arrays.

Reading order: state.py (what is carried), step.py (one step), draft.py, verify.py, acceptance.py, commit.py, loop.py,
then the host's side: prefill.py, generate.py.
"""
