"""OpenAI's requests as this node speaks them, checked at the edge; pure.

What a request may carry is decided by one rule: nothing that would change the answer is ignored. A field that changes nothing
(``store``, ``metadata``, …) is accepted; a field that is not supported yet is accepted at the value that means "as if absent" and
refused by name otherwise; a field nobody knows is refused, as OpenAI does. `reading.supported` applies it.

``fields.py`` has what several requests share, ``reading.py`` the way from bytes to a checked object, and each further module one
request. ``bridge/answers.py`` has the other direction.
"""
