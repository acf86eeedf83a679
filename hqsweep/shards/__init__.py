"""Tokens on disk: text becomes shards (prepare), and shards become windows (Shards), in an order that is a function.

    sources     which files, and how they are cut into pieces
    documents   the documents of a piece
    tokenizer   a tokenizer.json, its separator, and what it does not cover
    encode      a piece of documents as tokens
    worker      a process that does one piece after another
    pool        several workers
    prepare     all of it, which goes on after a kill
    manifest    what a folder of shards says of itself
    index       documents of a shard, as Megatron writes them
    stream      shards as one sequence of tokens
    reader      folders of shards, ours and others'
    order       which windows a step reads

A shard is a pair of files that Megatron reads too: NAME.bin has tokens without a header, each document followed by the
separator, and NAME.idx the documents' lengths.
"""
