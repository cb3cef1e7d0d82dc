"""A stand-in for SGLang: what weft-sglang uses of it, over gloo. test_contracts.py holds it to SGLang's."""
