#!/bin/sh
# Runs a command that trusts the CA bundle in the build secret ca_bundle, if there is one. The secret is mounted for one
# step only and is never stored in a layer.
bundle=/run/secrets/ca_bundle
if [ -s "$bundle" ]; then
  export PIP_CERT="$bundle" SSL_CERT_FILE="$bundle" REQUESTS_CA_BUNDLE="$bundle"
fi
exec "$@"
