"""Client bytes <-> engine bytes.

accept (``server``) -> parse head (``client``) -> route (``handler``) -> local answer, or model name and lease
(``dispatch``) -> forward (``forward``, ``relay``) -> relay (``pump``) -> record.
"""
