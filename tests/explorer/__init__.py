"""Every history of facts in small worlds, and what is wrong after each fact: the explorer.

``worlds`` says what there is and which facts may come, ``trial`` tells them to a scheduler, ``witness``
judges the answers, and ``explore`` goes through all histories, breadth first; ``bin/test explore`` starts it.
"""
