"""Generated from protos/pagemill/v1; see tools/gen_protos.sh."""
