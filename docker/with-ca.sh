#!/bin/sh
# Runs a command that trusts the build's own CA bundle (the secret ca_bundle), if the builder was given one. The bundle
# is mounted for that one step: nothing of it is kept in a layer.
bundle=/run/secrets/ca_bundle
if [ -s "$bundle" ]; then
  export PIP_CERT="$bundle" SSL_CERT_FILE="$bundle" REQUESTS_CA_BUNDLE="$bundle"
fi
exec "$@"
