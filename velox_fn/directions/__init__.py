"""What rows are compared with: filters from queries (`query_gram`), from keys (`key_svd`), leverage over values.

Pure linear algebra on arrays; imports of the core only `engine`.
"""
