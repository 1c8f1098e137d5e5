"""Pages that go to another process instead of an SSD."""

import multiprocessing
import os
import re
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from support import stores
from support.isolation import in_child, start_child
from support.paging import assert_bitwise_equal, page_out, wait_until
from support.small_module import MIB, adamw, make_module, snapshot, step

import torch_offload
from torch_offload import ConfigError, PageCorruptError, TierIOError


def test_trainings_over_one_store_are_bitwise_equal(scratch):
    """Where pages lie changes no bit, for two clients at once; and what the store counts is what they moved."""
    expected = in_child(stores.train, None)
    with stores.store_process(scratch, ram="1MiB") as store, ThreadPoolExecutor() as threads:
        both = list(threads.map(lambda address: in_child(stores.train, address), [store.address] * 2))
        report = store.end()
    assert_bitwise_equal(both, [expected] * 2)
    assert report["clients"] == 2
    assert report["received_bytes"] > MIB
    assert report["sent_bytes"] > MIB
    assert report["damaged_bytes"] == 0
    assert 0 < report["peak_bytes"] <= report["budget_bytes"] == MIB


@pytest.mark.parametrize(
    ("optimizer", "clips"),
    [("fused", True), ("foreach", True), ("sgd", False), ("own", True), ("own, 8-bit moments", False)],
)
def test_updates_at_the_store_are_bitwise_equal(scratch, optimizer, clips):
    """Its process runs all of them, by the optimizer's own kernels, and no other bit comes out."""
    expected = in_child(partial(stores.train, None, optimizer, clips=clips))
    with stores.store_process(scratch, ram="2MiB") as store:
        trained, counters = in_child(partial(stores.train_and_count, store.address, optimizer, clips=clips))
        report = store.end()
    assert_bitwise_equal(trained, expected)
    assert counters["applied_remotely"] == counters["applied_pages"] > 0
    assert 0 < report["updates"] <= counters["applied_remotely"]
    assert report["peak_bytes"] <= report["budget_bytes"]


def _train_and_list_moved(address):
    module = make_module()
    torch_offload.wrap(module, config=stores.config_for(address))
    optimizer = adamw(module)
    for _ in range(5):
        step(module, optimizer)
    torch_offload.flush()
    report = torch_offload.report()
    gradient_bytes = 5 * sum(weight.nbytes for weight in module.parameters())
    return report.read_bytes, report.written_bytes, gradient_bytes


def test_states_of_updates_at_the_store_never_cross(scratch):
    """Gradients go there once, weights when the model was wrapped, and states never."""
    with stores.store_process(scratch, ram="2MiB") as store:
        read, written, gradient_bytes = in_child(_train_and_list_moved, store.address)
    assert read["state"] == 0
    assert read["gradient"] < 0.5 * written["gradient"]  # ahead, of those that the program still had after their update
    assert written["state"] <= 8 * 4096  # small ones, which are copied into pages once
    assert 0.5 * gradient_bytes < written["gradient"] < 1.1 * gradient_bytes  # with the padding of small ones
    assert read["parameter"] > 0
    assert written["parameter"] < 0.3 * gradient_bytes


@pytest.mark.parametrize(
    ("options", "environment", "reason"),
    [
        (
            [],
            {"ATEN_CPU_CAPABILITY": "default"},
            r"its kernels \(torch .*, DEFAULT\) may give other bits than those here",
        ),
        (["--no-updates"], {}, "it was started without"),
    ],
    ids=["other kernels", "switched off"],
)
def test_a_store_that_may_give_other_bits_updates_nothing(scratch, options, environment, reason, caplog):
    with stores.store_process(scratch, *options, ram="2MiB", **environment) as store:
        module = make_module()
        with caplog.at_level("WARNING", logger="torch_offload"):
            torch_offload.wrap(module, config=stores.config_for(store.address))
        assert re.search(rf"store {store.address} runs no updates, .* cross the network: {reason}", caplog.text)
        expected = in_child(stores.train, None)
        optimizer = adamw(module)
        losses = [step(module, optimizer).item() for _ in range(stores.STEPS)]
        assert_bitwise_equal([losses, snapshot(module, optimizer)], expected)
        counters = torch_offload.report().counters
        assert counters["applied_pages"] > counters["applied_remotely"] == 0
        torch_offload.unwrap(module)
        assert store.end()["updates"] == 0


def test_an_update_that_takes_too_long_is_an_error_until_it_has_ended(scratch):
    """Whoever needs the page is told; and it is updated once."""
    expected = in_child(stores.train, None)
    with stores.store_process(scratch, ram="2MiB") as store:
        module = make_module()
        torch_offload.wrap(module, config=stores.config_for(store.address, io_timeout=1))
        optimizer = adamw(module)
        losses = [step(module, optimizer).item() for _ in range(stores.STEPS - 1)]
        optimizer.register_step_pre_hook(lambda *_: stores.stand_still(store))  # before the last step's updates
        losses.append(step(module, optimizer).item())
        with pytest.raises(TierIOError, match=rf"store {store.address}: nothing has come for .* nothing is lost"):
            module[0].weight.sum()
        store.process.send_signal(signal.SIGCONT)

        def is_usable():
            try:
                module[0].weight.sum()
            except TierIOError:
                return False
            return True

        wait_until(is_usable, "the store had gone on")
        assert_bitwise_equal([losses, snapshot(module, optimizer)], expected)
        torch_offload.unwrap(module)


def _train_until_the_store_is_gone(address, pid):
    module = make_module()
    torch_offload.wrap(module, config=stores.config_for(address))
    optimizer = adamw(module)
    step(module, optimizer)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(TierIOError, match=rf"store {address}"):
        snapshot(module, optimizer)


def test_a_store_that_is_killed_before_its_updates_is_an_error(scratch):
    with stores.store_process(scratch, ram="2MiB") as store:
        child = start_child(_train_until_the_store_is_gone, store.address, store.process.pid)
        child.join(120)
        assert child.exitcode == 0


def test_what_the_store_counts_is_what_the_client_counts(scratch):
    """To the byte, where every page is made of whole sectors; and what the client lets go is gone at the store."""
    with stores.store_here(scratch, ram=4 * MIB) as server:
        module = make_module()
        torch_offload.wrap(module, config=stores.config_for(server.address, min_paged_bytes=4096))
        optimizer = adamw(module)
        for _ in range(2):
            step(module, optimizer)
        torch_offload.flush()

        def counts() -> list[tuple[int, int]]:
            counted, report = server.statistics(), torch_offload.report()
            sides = (
                (counted["received_bytes"], counted["sent_bytes"]),
                (report.ssd_written_bytes, report.ssd_read_bytes),
            )
            return list(sides)

        wait_until(lambda: len(set(counts())) == 1, "what is read ahead had come, and both had counted the same")
        assert min(counts()[0]) > 0
        report = torch_offload.report()
        assert report.io_engine == f"store {server.address}"
        assert report.faults == 0
        torch_offload.unwrap(module)
        wait_until(lambda: server.statistics()["segments"] == 0, "what was unwrapped had left the store")


def test_memory_of_a_store_is_the_same_for_one_client_and_for_four(scratch):
    """A store that is full has as much for all as it had for one: what is on its way is lent from the same budget."""

    def train_at_once(clients):
        with stores.store_here(scratch, ram=MIB // 2) as server, ThreadPoolExecutor() as threads:
            list(threads.map(lambda address: in_child(stores.train_whole_pages, address), [server.address] * clients))
            return server.statistics()

    one, four = train_at_once(1), train_at_once(4)
    assert four["received_bytes"] > 3 * one["received_bytes"]
    peaks = [figures["memory"]["peak_bytes"] for figures in (one, four)]
    assert max(peaks) <= MIB // 2
    assert max(peaks) - min(peaks) <= MIB // 2 // 100
    assert max(figures["peak_lent_bytes"] for figures in (one, four)) <= MIB // 8


def test_a_store_that_does_not_answer_is_one_error():
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = "{}:{}".format(*free.getsockname())
    with pytest.raises(TierIOError, match=rf"store {address} does not answer: .*start one there: torch-offload store"):
        torch_offload.wrap(make_module(), config=stores.config_for(address))
    torch_offload.wrap(make_module(), ram="4MiB")  # nothing is left of it


def test_a_store_that_is_killed_is_an_error_at_the_next_access(scratch):
    with stores.store_process(scratch, ram="4MiB") as store:
        module = make_module()
        torch_offload.wrap(module, config=stores.config_for(store.address))
        page_out(module)
        store.process.kill()
        begin = time.monotonic()
        with pytest.raises(TierIOError, match=rf"store {store.address}.* 0\.weight: the page is gone"):
            module[0].weight.sum()
        assert time.monotonic() - begin < 30  # and not after the 120 s of io_timeout; usually at once
        with pytest.raises(TierIOError, match="the page is gone"):
            module[0].weight.sum()
        with torch.no_grad():
            module[0].weight.fill_(1.0)
        assert module[0].weight.sum() == module[0].weight.numel()


def test_a_store_that_stands_still_is_an_error_until_it_goes_on(scratch):
    with stores.store_process(scratch, ram="4MiB") as store:
        module = make_module()
        expected = module[0].weight.sum().item()
        torch_offload.wrap(module, config=stores.config_for(store.address, io_timeout=1))
        page_out(module)
        stores.stand_still(store)
        with pytest.raises(TierIOError, match=rf"store {store.address}: nothing has come for .* nothing is lost"):
            module[0].weight.sum()
        store.process.send_signal(signal.SIGCONT)
        wait_until(lambda: torch_offload.report().ssd_read_bytes > 0, "the page had come")
        assert module[0].weight.sum().item() == expected


def _page_out_and_stay(address, is_out):
    module = make_module()
    torch_offload.wrap(module, config=stores.config_for(address))
    page_out(module)
    is_out.set()
    threading.Event().wait()


def _bytes_in_use(server):
    figures = server.statistics()
    return figures["stored_bytes"] + figures["memory"]["frame_bytes"] - figures["memory"]["free_frame_bytes"]


def test_pages_of_a_client_that_is_killed_are_freed(scratch):
    with stores.store_here(scratch, ram=4 * MIB) as server:
        is_out = multiprocessing.get_context("forkserver").Event()
        child = start_child(_page_out_and_stay, server.address, is_out)
        assert is_out.wait(120)
        assert server.statistics()["segments"] > 0
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        wait_until(lambda: server.statistics()["clients"] == 0, "the store had noticed")
        assert server.statistics()["segments"] == 0
        wait_until(lambda: _bytes_in_use(server) == 0, "memory and SSD were free again")


@pytest.mark.parametrize("kind", [stores.PAGE, stores.BYTES], ids=["read", "write"])
def test_bytes_damaged_on_their_way_go_again(scratch, kind):
    """A page that arrives with another checksum goes once more, and the training is the same to the bit."""
    sizes = []

    def change(message, body):
        if message == kind:
            sizes.append(len(body))
            if len(sizes) in (3, 8, 20):
                body[len(body) // 2] ^= 16

    expected = in_child(stores.train, None)
    with stores.store_here(scratch, ram=4 * MIB) as server, stores.relay(server.address, change) as address:
        trained, counters = in_child(stores.train_and_count, address)
        assert_bitwise_equal(trained, expected)
        damaged = sum(sizes[number - 1] for number in (3, 8, 20))
        assert counters["retried_reads"] == counters["healed_mismatches"] == (3 if kind == stores.PAGE else 0)
        assert counters["retried_writes"] == (3 if kind == stores.BYTES else 0)
        assert server.statistics()["damaged_bytes"] == (damaged if kind == stores.BYTES else 0)


def test_a_page_that_is_always_damaged_is_named(scratch):
    is_broken = threading.Event()

    def change(message, body):
        if message == stores.PAGE and is_broken.is_set():
            body[0] ^= 1

    with stores.store_here(scratch, ram=4 * MIB) as server, stores.relay(server.address, change) as address:
        module = make_module()
        torch_offload.wrap(module, config=stores.config_for(address))
        page_out(module)
        is_broken.set()
        with pytest.raises(PageCorruptError, match=rf"store {address}: reading page \d+ of .*2\.weight: checksum"):
            module[2].weight.sum()
        is_broken.clear()
        assert module[0].weight.isfinite().all()
        with torch.no_grad():
            module[2].weight.zero_()
        torch_offload.unwrap(module)


@pytest.mark.parametrize(
    ("prefix", "expected"),
    [
        (stores.HEADER.pack(stores.MAGIC, 7, 1, 0, 0, *range(11)), b"it speaks protocol 7 of torch-offload store"),
        (b"GET / HTTP/1.1\r\nHost: store\r\n\r\n" + bytes(80), b"not the language of torch-offload store"),
        (stores.HEADER.pack(stores.MAGIC, stores.PROTOCOL, 1, 0, 0, *range(11)), b"has another checksum than was sent"),
    ],
    ids=["another protocol", "another language", "a damaged header"],
)
def test_a_store_refuses_what_it_does_not_understand(scratch, prefix, expected):
    with stores.store_here(scratch, ram=4 * MIB) as server:
        assert expected in stores.answer_to(server.address, prefix)
        module = make_module()
        torch_offload.wrap(module, config=stores.config_for(server.address))  # others are served
        torch_offload.unwrap(module)


def test_a_store_of_another_protocol_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer():
            connection, _ = listening.accept()
            with connection:
                connection.sendall(stores.HEADER.pack(stores.MAGIC, 7, 3, 0, 0, *range(11)))
                connection.recv(4096)

        thread = threading.Thread(target=answer)
        thread.start()
        address = "{}:{}".format(*listening.getsockname())
        with pytest.raises(TierIOError, match=r"it speaks protocol 7 .*, and this side 3; install the same version"):
            torch_offload.wrap(make_module(), config=stores.config_for(address))
        thread.join()


def test_pages_too_large_for_a_store_are_refused_at_wrap(scratch):
    with stores.store_here(scratch, ram=MIB) as server:
        settings = stores.config_for(server.address, ram="64MiB", page_elements=1 << 17)
        with pytest.raises(TierIOError, match="start it with --ram 2097152 at least, or lower page_elements"):
            torch_offload.wrap(make_module(), config=settings)


# Several stores


@pytest.mark.parametrize(
    ("optimizer", "clips"), [("fused", True), ("foreach", False), ("own", True), ("own, 8-bit moments", False)]
)
def test_pages_are_divided_among_stores(scratch, optimizer, clips):
    """Each has its part, runs the updates of it and keeps to its memory, and no other bit comes out."""
    expected = in_child(partial(stores.train, None, optimizer, clips=clips))
    with stores.store_process(scratch, ram="1MiB") as one, stores.store_process(scratch, ram="1MiB") as other:
        both = f"{one.address},{other.address}"
        trained, counters = in_child(partial(stores.train_and_count, both, optimizer, clips=clips))
        reports = [one.end(), other.end()]
    assert_bitwise_equal(trained, expected)
    assert counters["applied_remotely"] == counters["applied_pages"] > 0
    for name in ("received_bytes", "sent_bytes", "updates"):
        parts = [report[name] for report in reports]
        assert min(parts) > 0.3 * sum(parts), name
    assert max(report["peak_bytes"] for report in reports) <= MIB


def test_what_stores_count_is_what_the_client_counts(scratch):
    """The sum, to the byte; and what the client lets go is gone at each of them."""
    with stores.store_here(scratch, ram=4 * MIB) as one, stores.store_here(scratch, ram=4 * MIB) as other:
        module = make_module()
        both = f"{one.address},{other.address}"
        torch_offload.wrap(module, config=stores.config_for(both, min_paged_bytes=4096))
        optimizer = adamw(module)
        for _ in range(2):
            step(module, optimizer)
        torch_offload.flush()
        report = torch_offload.report()
        counted = [server.statistics() for server in (one, other)]
        sums = [sum(figures[name] for figures in counted) for name in ("received_bytes", "sent_bytes")]
        assert sums == [report.ssd_written_bytes, report.ssd_read_bytes]
        assert all(figures["segments"] > 0 for figures in counted)
        assert report.io_engine == f"store {one.address}, store {other.address}"
        assert report.faults == 0
        torch_offload.unwrap(module)
        for server in (one, other):
            wait_until(lambda server=server: server.statistics()["segments"] == 0, "what was unwrapped had left")


def _save(path):
    module = make_module()
    optimizer = adamw(module)
    for _ in range(2):
        step(module, optimizer)
    torch.save([module.state_dict(), optimizer.state_dict()], path)


def _resume(addresses, path):
    module = make_module()
    if addresses is not None:
        torch_offload.wrap(module, config=stores.config_for(addresses))
    optimizer = adamw(module)
    for target, saved in zip((module, optimizer), torch.load(path), strict=True):
        target.load_state_dict(saved)
    losses = [step(module, optimizer).item() for _ in range(stores.STEPS)]
    counters = torch_offload.report().counters if addresses is not None else {}
    return [losses, snapshot(module, optimizer)], counters


def test_states_of_a_checkpoint_lie_with_their_weights(scratch):
    """Each update of a training that is resumed runs at one of the stores."""
    checkpoint = scratch / "checkpoint.pt"
    in_child(partial(_save, checkpoint))
    expected, _ = in_child(partial(_resume, None, checkpoint))
    with stores.store_process(scratch, ram="1MiB") as one, stores.store_process(scratch, ram="1MiB") as other:
        trained, counters = in_child(partial(_resume, f"{one.address},{other.address}", checkpoint))
        updates = [store.end()["updates"] for store in (one, other)]
    assert_bitwise_equal(trained, expected)
    assert counters["applied_remotely"] == counters["applied_pages"] > 0
    assert min(updates) > 0


@pytest.mark.parametrize(
    ("options", "environment", "reason"),
    [([], {"ATEN_CPU_CAPABILITY": "default"}, "its kernels"), (["--no-updates"], {}, "it was started without")],
    ids=["other kernels", "switched off"],
)
def test_updates_of_pages_at_a_store_that_runs_none_stay_here(scratch, options, environment, reason, caplog):
    with (
        stores.store_process(scratch, ram="1MiB") as one,
        stores.store_process(scratch, *options, ram="1MiB", **environment) as other,
    ):
        module = make_module()
        with caplog.at_level("WARNING", logger="torch_offload"):
            torch_offload.wrap(module, config=stores.config_for(f"{one.address},{other.address}"))
        warned = [line for line in caplog.messages if "runs no updates" in line]
        assert len(warned) == 1
        assert re.search(rf"store {other.address} runs no updates, .* cross the network: {reason}", warned[0])
        expected = in_child(stores.train, None)
        optimizer = adamw(module)
        losses = [step(module, optimizer).item() for _ in range(stores.STEPS)]
        assert_bitwise_equal([losses, snapshot(module, optimizer)], expected)
        counters = torch_offload.report().counters
        assert counters["applied_pages"] > counters["applied_remotely"] > 0
        torch_offload.unwrap(module)
        assert [store.end()["updates"] > 0 for store in (one, other)] == [True, False]


def _train_until_one_is_gone(addresses, pid):
    module = make_module()
    torch_offload.wrap(module, config=stores.config_for(",".join(addresses)))
    optimizer = adamw(module)
    step(module, optimizer)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(TierIOError, match=rf"store {addresses[1]}"):
        snapshot(module, optimizer)


def test_one_store_that_is_killed_before_its_updates_is_named(scratch):
    with stores.store_process(scratch, ram="2MiB") as one, stores.store_process(scratch, ram="2MiB") as other:
        child = start_child(_train_until_one_is_gone, [one.address, other.address], other.process.pid)
        child.join(120)
        assert child.exitcode == 0


def test_one_store_that_is_killed_takes_its_pages_only(scratch):
    """What it had is an error that names it, at each access; the rest of the module stays usable."""
    with stores.store_process(scratch, ram="4MiB") as one, stores.store_here(scratch, ram=4 * MIB) as other:
        module = make_module()
        torch_offload.wrap(module, config=stores.config_for(f"{one.address},{other.address}"))
        page_out(module)
        one.process.kill()
        errors = []
        for weight in module.parameters():
            for rows in weight.data.flatten().split(4096):  # a page each
                try:
                    rows.sum()
                except TierIOError as error:
                    errors.append(str(error))
        assert errors
        assert all(re.search(rf"store {one.address}.*the page is gone", error) for error in errors)
        assert other.statistics()["sent_bytes"] > 0
        assert other.statistics()["clients"] == 1


def test_stores_of_different_memory_are_told_of_and_work(scratch, caplog):
    """Pages are divided evenly, so one line says which store is the smaller one; each keeps to its own memory."""
    with stores.store_here(scratch, ram=MIB) as small, stores.store_here(scratch, ram=4 * MIB) as large:
        module = make_module()
        expected = [weight.clone() for weight in module.parameters()]
        with caplog.at_level("WARNING", logger="torch_offload"):
            torch_offload.wrap(module, config=stores.config_for(f"{large.address},{small.address}"))
        told = [line for line in caplog.messages if "divided evenly" in line]
        assert len(told) == 1
        assert f"store {small.address} has {MIB} bytes of memory for them, store {large.address} {4 * MIB};" in told[0]
        page_out(module)
        assert_bitwise_equal(list(module.parameters()), expected)
        assert small.statistics()["memory"]["peak_bytes"] <= MIB
        torch_offload.unwrap(module)


def test_one_of_several_stores_that_does_not_answer_is_one_error(scratch):
    with socket.create_server(("127.0.0.1", 0)) as free:
        absent = "{}:{}".format(*free.getsockname())
    with stores.store_here(scratch, ram=4 * MIB) as server:
        for both in (f"{absent},{server.address}", f"{server.address},{absent}"):
            with pytest.raises(TierIOError, match=rf"store {absent} does not answer: .*start one there"):
                torch_offload.wrap(make_module(), config=stores.config_for(both))
        wait_until(lambda: server.statistics()["clients"] == 0, "the one that answered had been left")


def test_one_store_under_two_names_is_refused(scratch):
    with stores.store_here(scratch, ram=4 * MIB) as server:
        again = "localhost:" + server.address.rpartition(":")[2]
        with pytest.raises(ConfigError, match=rf"store {server.address} and store {again} are the same process"):
            torch_offload.wrap(make_module(), config=stores.config_for(f"{server.address},{again}"))
