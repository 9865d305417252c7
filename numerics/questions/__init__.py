"""The questions: which op, which bits, which relation, which part, and does the tool see what it
should.
"""
