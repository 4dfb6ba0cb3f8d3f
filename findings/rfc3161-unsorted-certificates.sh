#!/usr/bin/env bash
# rfc3161-client refuses time stamps of openssl whose certificates are not in DER's order.
#
# Packages: rfc3161-client 1.0.9, cryptography 50.0.2; openssl 3.0 (the program of the system).
# Behaviour: `openssl ts -reply` puts the signer's certificate in front of those of its chain. DER
#   asks that a SET be sorted by its bytes, and decode_timestamp_response raises a ValueError about
#   the structure where it is not, although `openssl ts -verify` accepts the answer and the order is
#   not signed. Whether it happens depends on the lengths of the two certificates.
# Expected: that a CMS SET OF certificates is read in any order, as other readers do.
# Instead: sort the certificates of the answer by their bytes before it is decoded.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install -q -q --disable-pip-version-check 'rfc3161-client==1.0.9' 'cryptography==50.0.2'
cat > expected.txt <<'EXPECTED'
in the order of DER: openssl accepts True, rfc3161-client reads it
not in the order of DER: openssl accepts True, rfc3161-client ValueError
EXPECTED
cat > tsa.cnf <<'SETTINGS'
[req]
distinguished_name=dn
[dn]
[root]
basicConstraints=critical,CA:TRUE
keyUsage=critical,keyCertSign
subjectKeyIdentifier=hash
[leaf]
basicConstraints=CA:FALSE
keyUsage=critical,digitalSignature
extendedKeyUsage=critical,timeStamping
[tsa]
default_tsa=here
[here]
serial=serial
crypto_device=builtin
signer_cert=leaf.pem
signer_key=leaf.key
certs=root.pem
signer_digest=sha256
default_policy=1.2.3.4
digests=sha256
ess_cert_id_alg=sha256
SETTINGS
env/bin/python -W ignore - > seen.txt <<'PYTHON'
import subprocess

import rfc3161_client
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding


def openssl(words, check=True):
    return subprocess.run(['openssl', *words.split()], check=check, capture_output=True).returncode == 0


def read(name):
    with open(name, 'rb') as file:
        return x509.load_pem_x509_certificate(file.read()).public_bytes(Encoding.DER)


with open('serial', 'w') as file:
    file.write('01\n')
request = 'req -new -newkey rsa:2048 -nodes -config tsa.cnf'
wanted = {True: 'in the order of DER', False: 'not in the order of DER'}
# A root holds its own name twice, so a long name makes it longer than the leaf, and its bytes greater.
for name in ('r' * 60, 'root'):
    openssl(f'{request} -x509 -subj /CN={name} -extensions root -keyout root.key -out root.pem')
    openssl(f'{request} -subj /CN=leaf -keyout leaf.key -out leaf.csr')
    openssl('x509 -req -in leaf.csr -out leaf.pem -CA root.pem -CAkey root.key -CAcreateserial '
            '-extfile tsa.cnf -extensions leaf')
    with open('data.txt', 'w') as file:
        file.write('a record\n')
    openssl('ts -query -data data.txt -sha256 -cert -out query.tsq')
    openssl('ts -reply -config tsa.cnf -section here -queryfile query.tsq -out answer.tsr')
    accepts = openssl('ts -verify -data data.txt -in answer.tsr -CAfile root.pem', check=False)
    with open('answer.tsr', 'rb') as file:
        content = file.read()
    leaf, root = content.find(read('leaf.pem')), content.find(read('root.pem'))
    ordered = (read('leaf.pem') < read('root.pem')) == (leaf < root)
    try:
        rfc3161_client.decode_timestamp_response(content)
        outcome = 'reads it'
    except ValueError as error:
        outcome = type(error).__name__
    print(f'{wanted[ordered]}: openssl accepts {accepts}, rfc3161-client {outcome}')
PYTHON
cat seen.txt
diff expected.txt seen.txt || { echo "CHANGED: the behaviour is no longer as described" >&2; exit 1; }
