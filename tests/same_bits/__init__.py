"""Small jobs whose every bit must stay as it was: run in a worktree of an old commit and here, then compared.

`make same-bits OLD=<commit>`, or `python -m tests.same_bits against COMMIT`. docs/testing.md says what they are for.
The repository holds no numbers of theirs: bits depend on the processor and on the build of TensorFlow. Each tree runs
its own copy of the jobs, with its own command line, so these modules use nothing but what stays when all within moves:
`import elastable as et`, `elastable.embedding_store`, the `elastable` command, the wire's stubs and files of a
documented format.

First commit of these jobs: 9da584d01f72. Compare with it what must not change a bit.
"""
