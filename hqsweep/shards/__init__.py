"""Tokens on disk: text becomes shards (prepare), and shards become windows (Shards), in an order that is a function.

    sources     which files, and how they are cut into pieces
    tokenizer   a tokenizer.json, its separator, and what it does not cover
    encode      a piece as documents, and these as tokens
    worker      a process that does one piece after another
    pool        several workers
    prepare     all of it, which goes on after a kill
    manifest    what a folder of shards says of itself, and the index of its documents, as Megatron writes it
    stream      shards as one sequence of tokens, and which windows of it a step reads
    reader      folders of shards, ours and others', and what is shown of one

A shard is a pair of files that Megatron reads too: NAME.bin has tokens without a header, each document followed by the
separator, and NAME.idx the documents' lengths.
"""
