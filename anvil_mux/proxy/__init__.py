"""Client bytes <-> engine bytes.

accept (``server``) -> parse head (``client``) -> route (``gateway``) -> local answer, or model name and lease
(``inference``) -> forward (``delivery``, ``relay``) -> relay (``pump``) -> record.
"""
