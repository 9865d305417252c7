"""Native implementations of the ops that the Array API has no words for, one module per
framework.
"""
