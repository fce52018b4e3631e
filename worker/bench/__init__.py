"""Measures the kernels through their Python face: `pagemill bench kernels`.

A case is one kernel on one shape; its contenders are Pagemill's kernel and, where there are some, others that do the
same work. All are timed in one run on one device, beside the bandwidths and product rates of that device, which give
each case its floor.
"""
