"""Planted leaks: small patches of the real step, each of which an audit or an invariant must
catch.
"""
