"""The machines of the agreement: each has one idea, and works on the one `AgreementState`.

None is above another as a class; each is handed those that it calls. Begin with `gather`;
`core.consensus.table` says which message goes to which of them.
"""
