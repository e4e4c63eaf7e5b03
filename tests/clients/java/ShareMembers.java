// Members of a share group: `ShareMembers BOOTSTRAP GROUP TOPIC MEMBERS`, until standard input ends. Each record is
// accepted. Lines: `delivered VALUE COUNT`, then `kept VALUE` or `unsure VALUE ERROR` when its acknowledgement has ended.

import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.Properties;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaShareConsumer;
import org.apache.kafka.common.KafkaException;
import org.apache.kafka.common.TopicIdPartition;
import org.apache.kafka.common.serialization.StringDeserializer;

public class ShareMembers {
    static volatile boolean ending = false;

    static synchronized void say(String line) {
        System.out.println(line);
        System.out.flush();
    }

    static void consume(String bootstrap, String group, String topic) {
        Properties p = new Properties();
        p.put("bootstrap.servers", bootstrap);
        p.put("group.id", group);
        p.put("share.acknowledgement.mode", "explicit");
        p.put("max.poll.records", "20");
        p.put("request.timeout.ms", "5000");
        p.put("default.api.timeout.ms", "10000");
        try (var consumer = new KafkaShareConsumer<>(p, new StringDeserializer(), new StringDeserializer())) {
            consumer.subscribe(List.of(topic));
            while (!ending) {
                List<ConsumerRecord<String, String>> records = new ArrayList<>();
                try {
                    consumer.poll(Duration.ofMillis(200)).forEach(records::add);
                } catch (KafkaException error) {
                    say("trouble " + error);
                    continue;
                }
                if (records.isEmpty()) continue;
                for (var record : records) {
                    say("delivered " + record.value() + " " + record.deliveryCount().orElse((short) 0));
                    consumer.acknowledge(record);
                }
                Map<TopicIdPartition, Optional<KafkaException>> results = consumer.commitSync(Duration.ofSeconds(10));
                for (var record : records) {
                    String how = "nothing";
                    for (var result : results.entrySet()) {
                        if (result.getKey().partition() == record.partition()) {
                            how = result.getValue().map(error -> error.getClass().getSimpleName()).orElse("kept");
                        }
                    }
                    say(how.equals("kept") ? "kept " + record.value() : "unsure " + record.value() + " " + how);
                }
            }
        }
    }

    public static void main(String[] arguments) throws Exception {
        List<Thread> members = new ArrayList<>();
        for (int nth = 0; nth < Integer.parseInt(arguments[3]); nth++) {
            members.add(new Thread(() -> consume(arguments[0], arguments[1], arguments[2])));
        }
        for (Thread member : members) member.start();
        System.in.read();
        ending = true;
        for (Thread member : members) member.join();
    }
}
