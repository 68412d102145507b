#!/usr/bin/env bash
# A real SLURM on this machine for the tests: one node with two cores and two pretend GPUs, accounts included.
#
#     tests/slurm/cluster.sh start     install what is missing (Debian, Ubuntu; root) and bring everything up
#     tests/slurm/cluster.sh status    0 when jobs can be submitted
#     tests/slurm/cluster.sh stop      end the daemons and remove every file
#
# All files and sockets lie in one folder and the ports are spare ones, so a SLURM or a MariaDB of the machine's
# own is left alone. Clients find the cluster through SLURM_CONF=/tmp/tiny_llm_slurm/slurm.conf. It needs neither
# systemd nor cgroups. `start` may be called again any time.
set -euo pipefail

readonly FOLDER=/tmp/tiny_llm_slurm
readonly PORT=26817 # slurmctld; slurmd, slurmdbd and MariaDB follow
readonly PACKAGES="slurm-wlm slurmdbd munge mariadb-server"
export SLURM_CONF=$FOLDER/slurm.conf

main() {
    case "${1:-}" in
        start) start ;;
        status) status ;;
        stop) stop ;;
        *) echo "usage: $0 start|status|stop" >&2; exit 2 ;;
    esac
}

status() {
    [ -f "$SLURM_CONF" ] && timeout 10 sinfo --noheader --format %T 2>/dev/null | grep -Eq 'idle|mix|alloc' \
        && timeout 10 sacct --noheader >/dev/null 2>&1
}

start() {
    if status; then
        echo "SLURM is up: SLURM_CONF=$SLURM_CONF"
        return
    fi
    [ "$(id -u)" = 0 ] || { echo "cluster.sh start: needs root" >&2; exit 1; }
    install_packages
    stop
    write_settings
    start_munge
    start_database
    start_daemon slurmdbd
    wait_for "slurmdbd" timeout 5 sacctmgr --immediate list cluster
    sacctmgr --immediate add cluster tiny_llm >/dev/null 2>&1 || true
    start_daemon slurmctld
    wait_for "slurmctld" timeout 5 scontrol ping
    start_daemon slurmd
    wait_for "the node" status
    echo "SLURM is up: SLURM_CONF=$SLURM_CONF"
}

install_packages() {
    command -v slurmctld slurmd slurmdbd munged mariadbd sbatch >/dev/null && return
    command -v apt-get >/dev/null || { echo "cluster.sh start: needs $PACKAGES" >&2; exit 1; }
    local policy=/usr/sbin/policy-rc.d made=
    if [ ! -e $policy ]; then # the packages' own services stay down
        printf '#!/bin/sh\nexit 101\n' >$policy
        chmod 755 $policy
        made=$policy
    fi
    apt-get update -qq
    # shellcheck disable=SC2086
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $PACKAGES >/dev/null
    [ -z "$made" ] || rm "$made"
}

write_settings() {
    mkdir -p $FOLDER/{munge,database,state,spool,log}
    chmod 755 $FOLDER
    local secret
    secret=$(head -c 32 /dev/urandom | sha256sum | cut -c1-32)
    (umask 077 && echo "$secret" >$FOLDER/password)
    make_pretend_gpus
    cat >$FOLDER/slurm.conf <<END
ClusterName=tiny_llm
SlurmctldHost=$(hostname)(127.0.0.1)
SlurmctldPort=$PORT
SlurmdPort=$((PORT + 1))
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$FOLDER/munge/socket
CredType=cred/munge
StateSaveLocation=$FOLDER/state
SlurmdSpoolDir=$FOLDER/spool
SlurmctldPidFile=$FOLDER/slurmctld.pid
SlurmdPidFile=$FOLDER/slurmd.pid
SlurmctldLogFile=$FOLDER/log/slurmctld.log
SlurmdLogFile=$FOLDER/log/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort=$((PORT + 2))
AccountingStoragePass=$FOLDER/munge/socket
MpiDefault=none
ReturnToService=2
KillWait=20
MaxArraySize=1001
GresTypes=gpu
NodeName=$(hostname) NodeAddr=127.0.0.1 CPUs=2 Gres=gpu:2 State=UNKNOWN
PartitionName=main Nodes=$(hostname) Default=YES MaxTime=INFINITE State=UP
END
    echo "NodeName=$(hostname) Name=gpu File=/dev/fakegpu[0-1]" >$FOLDER/gres.conf
    (umask 077 && cat >$FOLDER/slurmdbd.conf) <<END
AuthType=auth/munge
AuthInfo=socket=$FOLDER/munge/socket
DbdHost=$(hostname)
DbdAddr=127.0.0.1
DbdPort=$((PORT + 2))
SlurmUser=root
LogFile=$FOLDER/log/slurmdbd.log
PidFile=$FOLDER/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort=$((PORT + 3))
StorageLoc=slurm_acct_db
StorageUser=slurm
StoragePass=$secret
END
}

make_pretend_gpus() { # any character device serves
    local number
    for number in 0 1; do
        [ -e /dev/fakegpu$number ] || mknod /dev/fakegpu$number c 1 3
    done
}

start_munge() {
    local keys=$FOLDER/munge
    head -c 128 /dev/urandom >$keys/key
    chown -R munge:munge $keys
    chmod 755 $keys
    chmod 400 $keys/key
    as munge munged --key-file=$keys/key --socket=$keys/socket --pid-file=$keys/munged.pid \
        --log-file=$keys/munged.log --seed-file=$keys/seed
}

start_database() {
    local data=$FOLDER/database
    chown mysql:mysql $data
    as mysql mariadb-install-db --no-defaults --datadir=$data/files --skip-test-db >$FOLDER/log/database.log 2>&1
    setpriv --reuid=mysql --regid=mysql --clear-groups mariadbd --no-defaults --datadir=$data/files --socket=$data/socket --pid-file=$data/mariadbd.pid \
        --bind-address=127.0.0.1 --port=$((PORT + 3)) --innodb-lock-wait-timeout=900 \
        >>$FOLDER/log/database.log 2>&1 </dev/null &
    disown
    wait_for "MariaDB" mariadb-admin --no-defaults --user=root --socket=$data/socket ping
    mariadb --no-defaults --user=root --socket=$data/socket <<END
CREATE DATABASE slurm_acct_db;
CREATE USER slurm@'127.0.0.1' IDENTIFIED BY '$(cat $FOLDER/password)';
CREATE USER slurm@localhost IDENTIFIED BY '$(cat $FOLDER/password)';
GRANT ALL ON slurm_acct_db.* TO slurm@'127.0.0.1';
GRANT ALL ON slurm_acct_db.* TO slurm@localhost;
END
}

start_daemon() { # NAME: slurmdbd reads its settings beside slurm.conf
    "$(command -v "$1")" </dev/null >>"$FOLDER/log/$1.out" 2>&1
}

as() { # USER COMMAND...
    local user=$1
    shift
    setpriv --reuid="$user" --regid="$user" --clear-groups "$@"
}

wait_for() { # WHAT COMMAND...
    local what=$1 end=$((SECONDS + 40))
    shift
    while [ $SECONDS -lt $end ]; do
        "$@" >/dev/null 2>&1 && return
        sleep 0.3
    done
    echo "cluster.sh: $what does not come up; see $FOLDER/log" >&2
    exit 1
}

stop() {
    local file pid
    for file in slurmd slurmctld slurmdbd munge/munged database/mariadbd; do
        pid=$(cat "$FOLDER/$file.pid" 2>/dev/null) || continue
        kill "$pid" 2>/dev/null || continue
        for _ in $(seq 100); do
            [ -e "/proc/$pid" ] || break
            sleep 0.1
        done
        [ ! -e "/proc/$pid" ] || kill -9 "$pid" 2>/dev/null || true
    done
    rm -rf "$FOLDER"
}

main "$@"
