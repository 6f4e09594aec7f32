"""A public test kit for engines that embed the library, and for parts that plug into it.

`device` and `clock` let a test say when copies land and time passes, `order` finds accesses that came too early,
`asserts` checks that nothing is left behind, `toy_engine` is a small serving engine. The `*_contract` modules are
pytest classes to subclass, and `strategies` are for hypothesis; only those need pytest and hypothesis.
"""
