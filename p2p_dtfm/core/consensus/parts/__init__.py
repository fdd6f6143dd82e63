"""The machines of the agreement: each has one idea, and works on the one `AgreementState`.

No machine inherits from another; each is handed those that it calls. Begin with `gather`;
`core.consensus.table` says which message goes to which of them.
"""
